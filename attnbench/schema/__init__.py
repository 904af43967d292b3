"""Case, record, finding: frozen values, their JSON, ids and versions."""

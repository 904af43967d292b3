"""Producers: what each command found, as a document."""

"""Evidence for the rules of attnbench: how often its times and verdicts are wrong."""

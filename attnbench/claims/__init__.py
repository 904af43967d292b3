"""The claims ledger: what five notes on attention say, checked one statement at a time.

`ledger.ledger(run)` gives every claim with its finding. One module a subject registers its claims
in `claim.CLAIMS`; adding one is one small function with a decorator.
"""

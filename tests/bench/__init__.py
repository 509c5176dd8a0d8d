"""How long everything takes: ``make bench``, or ``python -m tests.bench`` from the checkout."""

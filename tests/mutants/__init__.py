"""Mutants: precautions of the package are taken out one by one, and a law must notice each time.

``make test-mutants`` runs them. Each module of this package other than the harness has a tuple
``MUTANTS`` of :class:`~mutants.mutant.Mutant`, which ``test_mutants.py`` finds by itself.
"""

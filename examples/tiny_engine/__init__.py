"""A small paged LLM engine in numpy: the pattern for connecting an engine to kvpool.

``model`` computes, ``blocks`` keeps the block table's pool, ``engine`` runs requests, ``sharing`` talks to kvpool.
"""

"""The stores that ship with kvpool, one private file each; reached by URL through :mod:`kvpool.registry`."""

"""Thin adapters between lapwing and packages around it; each needs an extra, such as `pip install lapwing[sklearn]`.

One file a package, over the public names alone; no file imports another, and nothing imports this room. Begin with
`sklearn.py`.
"""

"""Thin adapters between lapwing and packages around it; each needs an extra, such as `pip install lapwing[sklearn]`.

One file a package, over what other rooms export; nothing imports this room. Begin with `sklearn.py`.
"""

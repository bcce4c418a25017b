"""Thin adapters between lapwing and packages around it; each needs an extra, such as `pip install lapwing[sklearn]`.

One file a package, over what other folders export; nothing imports this one. Begin with `sklearn.py`.
"""

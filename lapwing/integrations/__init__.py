"""Thin adapters between lapwing and other packages; each needs an extra, such as `"lapwing-torch[sklearn]"`.

There is one file per package, and no other room imports them. Begin with `sklearn.py`.
"""

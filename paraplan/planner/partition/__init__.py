"""Partitions of plain cost problems: layers onto strategies, ordered graphs into stages, and nodes onto devices.

Cores take arrays of costs, not models; other systems' instances are problems of these forms.
"""

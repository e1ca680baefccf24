"""Ops whose strategy takes several instructions: rings, routes, stripes, products in pieces.

Each is a record that lowering emits step by step (`lowering.blocks.expand`).
"""

"""What makes a block cheaper than op by op: chunks, sums made by products, casts once, joined norms and writes."""

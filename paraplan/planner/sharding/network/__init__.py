"""Cost networks solved: message passing, multipliers, branch and bound, and the flow-form ILP for what stays open."""

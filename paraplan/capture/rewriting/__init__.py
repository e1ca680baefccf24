"""Normal forms of what was recorded: few kinds of ops, explicit sizes, sums that shards of a batch add up."""

"""`deltaforge bench`: measurements that compare machines, each with its raw limit."""

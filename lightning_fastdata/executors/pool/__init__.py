"""Side processes that fetch, what they are told, and what happens when they die."""

"""Side processes that fetch, what is sent to them, and what happens when they die."""

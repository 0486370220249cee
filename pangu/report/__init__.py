"""Reports for people: runs, searches of the planner, pipeline stages, sharding and dry runs."""

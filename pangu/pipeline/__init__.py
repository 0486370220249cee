"""Pipeline parallelism: schedules as data, their simulation and expansion, and the runner that executes them."""

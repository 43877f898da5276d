"""MuJoCo tasks, stepped by MuJoCo's own C on a CPU and by mujoco-warp on a GPU."""

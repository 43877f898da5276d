"""MuJoCo tasks on the GPU by mujoco-warp."""

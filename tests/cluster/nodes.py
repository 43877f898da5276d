"""A cluster of Ray on this machine alone whose nodes come and go: `python -m tests.cluster.nodes`
prints the address, and obeys `add` and `remove` on its standard input.
"""

import os
import sys
from typing import Any

# as `gpurl.cluster.ray_places.connect` does
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
NODE: dict[str, Any] = {
    "num_cpus": 1,
    "object_store_memory": 80 << 20,
    "node_ip_address": "127.0.0.1",
}

if __name__ == "__main__":
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    print(cluster.address, flush=True)
    nodes = []
    for line in sys.stdin:
        if line.strip() == "add":
            nodes.append(cluster.add_node(**NODE))
        elif line.strip() == "remove":
            cluster.remove_node(nodes.pop(), allow_graceful=False)
    cluster.shutdown()

"""A cluster of Ray on this machine alone, as gpurl starts it, until its standard input ends:
`python -m tests.cluster.head` prints the address.
"""

import sys

from gpurl.cluster.ray_places import connect

if __name__ == "__main__":
    ray = connect(None)
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.readline()
    ray.shutdown()

"""What measures this project beside its peers, and the stress tool. For developers."""

import time

STARTED = time.perf_counter()  # before the imports of a script in this folder, which count as its start-up

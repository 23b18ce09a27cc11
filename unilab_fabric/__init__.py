"""Robot-learning trainer: FastSAC and FlashSAC on MuJoCo, launched by Lightning Fabric, one process per device."""

import time

STARTED_AT = time.time()
"""When this process began to load the package, in seconds [s] since the epoch; start-up times count from here."""

__version__ = "0.1.0"

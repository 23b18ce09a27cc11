"""Robot-learning trainer: FastSAC on MuJoCo, launched by Lightning Fabric, one process per device."""

__version__ = "0.1.0"

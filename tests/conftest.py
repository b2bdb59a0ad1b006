"""What all tests share: hypothesis without wall-clock verdicts, which a busy machine would fail by chance."""

from hypothesis import HealthCheck, settings

settings.register_profile("kvstore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvstore")

"""What hypothesis may take on a busy machine: as long as it takes."""

from hypothesis import HealthCheck, settings

settings.register_profile("busy machine", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

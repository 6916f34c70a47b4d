"""Recovery: stop requests and fault injection (signals.py), loss spikes (spikes.py), lost ranks (elastic.py)."""

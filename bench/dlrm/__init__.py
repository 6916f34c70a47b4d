"""Recommendation models beside TorchRec: `lakh bench dlrm`."""

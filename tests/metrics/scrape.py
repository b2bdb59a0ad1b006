"""What a store tells Prometheus, read as Prometheus reads it."""

import urllib.request
from urllib.error import URLError

from prometheus_client.parser import text_string_to_metric_families


def samples_of(text):
    """Return the numbers by series: its name and its labels, sorted."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def read(url, timeout_s=30):
    """Return the body at a loopback address; None while nobody answers there."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return answer.read().decode()
    except (URLError, ConnectionError, TimeoutError):
        return None


def scrape(store):
    """Return the series that a store process tells."""
    return samples_of(read(f"http://127.0.0.1:{store.settings.http_port}/metrics"))

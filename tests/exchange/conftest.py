"""The browser of the demo's tests, for the page that is sent."""

from tests.serving.conftest import browser as browser

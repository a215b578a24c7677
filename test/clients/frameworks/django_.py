# Django: the middleware in a request, bulk_create, and TestCase in a new database with
# a migration.
import os
import sys
import unittest
from io import StringIO

import django
import psycopg2
from django.conf import settings

import example
from facts import fact, facts_of

settings.configure(
    DATABASES={'default': {'ENGINE': 'django.db.backends.postgresql', 'CONN_MAX_AGE': None,
                           'NAME': os.environ['PGDATABASE'], 'HOST': os.environ['PGHOST'], 'PORT': os.environ['PGPORT'],
                           'USER': os.environ['PGUSER'], 'TEST': {'NAME': 'test_shop'}}},
    ALLOWED_HOSTS=['*'], ROOT_URLCONF='__main__', MIDDLEWARE=['example.RateLimit'], INSTALLED_APPS=['shop'],
    DEFAULT_AUTO_FIELD='django.db.models.BigAutoField', DEBUG_PROPAGATE_EXCEPTIONS=True)
django.setup()

from django.db import connection, transaction  # noqa: E402
from django.http import HttpResponse  # noqa: E402
from django.test import Client, TestCase, runner  # noqa: E402
from django.urls import path  # noqa: E402
from shop.models import Order  # noqa: E402


def order(request, customer, rows):
    with transaction.atomic():
        Order.objects.bulk_create([Order(customer=customer) for _ in range(rows)])
    return HttpResponse(status=201)


urlpatterns = [path('<int:customer>/<int:rows>', order)]


def answer(customer, rows):
    response = Client().get(f'/{customer}/{rows}')
    return f"{response.status_code} {response.headers.get('Retry-After')}"


def pid():
    with connection.cursor() as cursor:
        cursor.execute('SELECT pg_backend_pid()')
        return cursor.fetchone()[0]


class Orders(TestCase):
    """Each test inserts three rows and rolls back."""
    def test_1(self):
        Order.objects.bulk_create([Order(customer=1) for _ in range(3)])

    test_2 = test_1


if 'tests' in sys.argv:
    tests = runner.DiscoverRunner(verbosity=0)
    databases = tests.setup_databases()
    result = unittest.TextTestRunner(stream=StringIO()).run(unittest.TestLoader().loadTestsFromTestCase(Orders))
    tests.teardown_databases(databases)
    fact('tests', f'{len(result.errors)} of {result.testsRun} fail')
    sys.exit()

fact('version', f'Django {django.get_version()}, psycopg {psycopg2.__version__.split()[0]}')
facts_of(lambda customer, rows: order(None, customer, rows), answer, pid)

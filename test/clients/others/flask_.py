# flask-limiter at the times of LONG, as node.js prints its answers.
import os
import time

from flask import Flask
from flask_limiter import Limiter

now = 0.0
time.time = lambda: now


def answers(strategy):
    global now
    app = Flask(__name__)
    Limiter(lambda: 'k', app=app, default_limits=['10 per minute'], strategy=strategy, storage_uri='memory://')
    app.add_url_rule('/', view_func=lambda: 'done')
    client = app.test_client()
    for ms in os.environ['LONG'].split():
        now = int(ms) / 1000
        yield str(int(client.get('/').status_code == 200))


for strategy in 'fixed-window', 'moving-window':
    print('flask ' + strategy.split('-')[0], ''.join(answers(strategy)), sep='\t', flush=True)
os._exit(0)  # its threads would wait

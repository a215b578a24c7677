# What the Python frameworks have in common.  STATE and HINT are the page's expressions.
import os


def fact(name, value):
    print(name, value, sep='\t', flush=True)


def error_of(attempt):
    try:
        attempt()
    except Exception as error:
        return error


def state_of(attempt):
    return eval(os.environ['STATE'], {'error': error_of(attempt)})


def facts_of(order, answer, pid):
    """order(customer, rows) inserts rows, and answer(customer, rows) does it in a request."""
    customer = int(os.environ['CUSTOMER'])
    before = pid()
    order(customer, 5)
    error = error_of(lambda: order(customer, 1))
    fact('class', f'{type(error).__module__}.{type(error).__name__}')
    fact('state', eval(os.environ['STATE'], {'error': error}))
    fact('hint', eval(os.environ['HINT'], {'error': error}))
    fact('answer', answer(customer, 1))
    fact('other answer', eval(os.environ['STATE'], {'error': error_of(lambda: answer(customer + 1, 6))}))
    fact('rows', state_of(lambda: order(customer + 2, 6)))
    fact('then', state_of(lambda: order(customer + 2, 1)))
    fact('connection', 'kept' if pid() == before else 'closed')

# The Python clients' half of what clients.pl describes.
import datetime
import sys

CONVERT = {
    'i': int,
    'f': float,
    's': str,
    'a': lambda text: text.split('|'),
    'b': lambda text: [int(item) for item in text.split('|')],
    't': datetime.datetime.fromisoformat,
    'n': lambda text: None,
}


def serve(version, connection, error_class, example):
    """Answers requests. connection() is a context that takes a connection from the pool."""
    for line in sys.stdin:
        sql, *params = line.rstrip('\n').split('\t')
        params = [CONVERT[param[0]](param[2:]) for param in params]
        pid = None
        try:
            if sql == 'version':
                answer = ['ok', version]
            elif sql == 'place_order':
                with connection() as taken:
                    example.place_order(taken, *params)
                answer = ['ok']
            else:
                with connection() as taken, taken.cursor() as cursor:
                    cursor.execute('SELECT pg_backend_pid()')
                    pid = cursor.fetchone()[0]
                    cursor.execute(sql.replace('?', '%s'), params)
                    row = cursor.description and cursor.fetchone() or ()
                answer = ['ok', *(f'{type(value).__name__}:{value}' for value in row)]
        except error_class as error:
            diag = error.diag
            kind = type(error)
            answer = ['error', f'{kind.__module__}.{kind.__name__}', diag.sqlstate, example.retry_after(error),
                      diag.message_primary, diag.message_detail, diag.message_hint,
                      diag.schema_name, diag.table_name, diag.constraint_name]
        answer = ['' if field is None else str(field).replace('\n', '\\n') for field in [pid, *answer]]
        print(*answer, sep='\t', flush=True)

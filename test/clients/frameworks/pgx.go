// pgx: a batch, CopyFrom, and the handler in a server of net/http.
package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"

	"github.com/jackc/pgconn"
	"github.com/jackc/pgx/v4"
	"github.com/jackc/pgx/v4/pgxpool"
)

var ctx = context.Background()
var pool *pgxpool.Pool

func fact(name string, value interface{}) { fmt.Printf("%s\t%v\n", name, value) }

func order(customer int, rows int) error {
	_, err := pool.Exec(ctx, "INSERT INTO orders (customer) SELECT $1::int FROM generate_series(1, $2::int)", customer, rows)
	return err
}

func copyFrom(customer int, rows int) error {
	values := make([][]interface{}, rows)
	for i := range values {
		values[i] = []interface{}{customer}
	}
	_, err := pool.CopyFrom(ctx, pgx.Identifier{"orders"}, []string{"customer"}, pgx.CopyFromRows(values))
	return err
}

func batch(table string, customer int, rows int) error {
	var inserts pgx.Batch
	for i := 0; i < rows; i++ {
		inserts.Queue("INSERT INTO "+table+" (customer) VALUES ($1)", customer)
	}
	return pool.SendBatch(ctx, &inserts).Close()
}

func refusalOf(err error) *pgconn.PgError {
	var refusal *pgconn.PgError
	if !errors.As(err, &refusal) {
		refusal = &pgconn.PgError{}
	}
	return refusal
}

func state(err error) string {
	refusal := refusalOf(err)
	return @STATE@
}

func hint(err error) string {
	refusal := refusalOf(err)
	return @HINT@
}

func answer(customer int, rows int) string {
	response := httptest.NewRecorder()
	http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := order(customer, rows); err != nil && !tooMany(w, err) {
			http.Error(w, state(err), http.StatusInternalServerError)
		}
	}).ServeHTTP(response, httptest.NewRequest("POST", "/", nil))
	if response.Code == http.StatusInternalServerError {
		return response.Body.String()
	}
	return fmt.Sprint(response.Code, " ", response.Header().Get("Retry-After"))
}

func pid() (pid int) {
	pool.QueryRow(ctx, "SELECT pg_backend_pid()").Scan(&pid)
	return pid
}

func main() {
	var err error
	if pool, err = pgxpool.Connect(ctx, "pool_max_conns=1"); err != nil {
		panic(err)
	}
	customer, _ := strconv.Atoi(os.Getenv("CUSTOMER"))
	before := pid()
	fact("version", "pgx 4")
	order(customer, 5)
	err = order(customer, 1)
	fact("class", fmt.Sprintf("%T", err))
	fact("state", state(err))
	fact("hint", hint(err))
	fact("answer", answer(customer, 1))
	fact("other answer", answer(customer+1, 6))
	fact("rows", state(copyFrom(customer+2, 6)))
	fact("then", state(copyFrom(customer+2, 1)))
	fact("batch", state(batch("orders", customer+4, 6)))
	fact("batch again", state(batch("orders", customer+4, 6)))
	fact("batch that refunds", state(batch("refunded_orders", customer+5, 6)))
	fact("connection", map[bool]string{true: "kept", false: "closed"}[pid() == before])
}

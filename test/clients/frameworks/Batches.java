import java.sql.BatchUpdateException;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import org.postgresql.util.DriverInfo;
import org.postgresql.util.PSQLException;

/** JDBC's batches. Orders is the class of docs/clients.md. */
class Batches {
    static void fact(String name, Object value) { System.out.println(name + "\t" + value); }

    static BatchUpdateException order(Connection connection, String table, int customer, int rows) throws SQLException {
        try (PreparedStatement insert = connection.prepareStatement("INSERT INTO " + table + " (customer) VALUES (?)")) {
            for (int i = 0; i < rows; i++) {
                insert.setInt(1, customer);
                insert.addBatch();
            }
            insert.executeBatch();
            return null;
        } catch (BatchUpdateException error) {
            return error;
        }
    }

    static String state(BatchUpdateException error) { return @STATE@; }

    static String hint(BatchUpdateException error) { return @HINT@; }

    static int pid(Connection connection) throws SQLException {
        try (ResultSet rows = connection.createStatement().executeQuery("SELECT pg_backend_pid()")) {
            rows.next();
            return rows.getInt(1);
        }
    }

    static Connection connect(String options) throws SQLException {
        return DriverManager.getConnection("jdbc:postgresql://" + System.getenv("PGHOST") + ":" + System.getenv("PGPORT") + "/"
            + System.getenv("PGDATABASE") + options, System.getenv("PGUSER"), "");
    }

    public static void main(String[] arguments) throws Exception {
        int customer = Integer.parseInt(System.getenv("CUSTOMER"));
        fact("version", "JDBC " + DriverInfo.DRIVER_VERSION + ", `executeBatch`");
        try (Connection connection = connect("")) {
            int before = pid(connection);
            order(connection, "orders", customer, 5);
            BatchUpdateException error = order(connection, "orders", customer, 1);
            fact("class", error.getClass().getName());
            fact("state", state(error));
            fact("hint", hint(error));
            fact("seconds", Orders.retryAfter((PSQLException) error.getCause()));
            fact("batch", state(order(connection, "orders", customer + 4, 6)));
            fact("batch again", state(order(connection, "orders", customer + 4, 6)));
            fact("batch that refunds", state(order(connection, "refunded_orders", customer + 5, 6)));
            fact("connection", pid(connection) == before ? "kept" : "closed");
        }
        try (Connection connection = connect("?reWriteBatchedInserts=true")) {
            fact("rows", state(order(connection, "orders", customer + 2, 8)));
            fact("then", state(order(connection, "orders", customer + 2, 1)));
        }
    }
}

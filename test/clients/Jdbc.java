import com.zaxxer.hikari.HikariConfig;
import com.zaxxer.hikari.HikariDataSource;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.sql.Connection;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.time.OffsetDateTime;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.stream.Collectors;
import org.postgresql.util.DriverInfo;
import org.postgresql.util.PSQLException;
import org.postgresql.util.ServerErrorMessage;

/** JDBC with HikariCP. */
class Jdbc {
    static void bind(Connection connection, PreparedStatement statement, int n, String param) throws SQLException {
        String text = param.substring(2);
        switch (param.charAt(0)) {
            case 'i': statement.setInt(n, Integer.parseInt(text)); break;
            case 'f': statement.setDouble(n, Double.parseDouble(text)); break;
            case 's': statement.setString(n, text); break;
            case 'a': statement.setArray(n, connection.createArrayOf("text", text.split("\\|"))); break;
            case 'b':
                statement.setArray(n, connection.createArrayOf("bigint",
                    Arrays.stream(text.split("\\|")).map(Long::valueOf).toArray()));
                break;
            case 't': statement.setObject(n, OffsetDateTime.parse(text)); break;
            default: statement.setObject(n, null);
        }
    }

    static List<Object> run(HikariDataSource pool, List<Object> answer, String[] request) throws SQLException {
        try (Connection connection = pool.getConnection()) {
            try (PreparedStatement statement = connection.prepareStatement("SELECT pg_backend_pid()");
                    ResultSet rows = statement.executeQuery()) {
                rows.next();
                answer.set(0, rows.getInt(1));
            }
            try (PreparedStatement statement = connection.prepareStatement(request[0])) {
                for (int i = 1; i < request.length; i++) {
                    bind(connection, statement, i, request[i]);
                }
                answer.add("ok");
                if (statement.execute()) {
                    ResultSet rows = statement.getResultSet();
                    boolean found = rows.next();
                    for (int i = 1; found && i <= rows.getMetaData().getColumnCount(); i++) {
                        Object value = rows.getObject(i);
                        answer.add((value == null ? "null" : value.getClass().getSimpleName()) + ":" + value);
                    }
                }
            }
        }
        return answer;
    }

    static List<Object> answer(HikariDataSource pool, String[] request) {
        List<Object> answer = new ArrayList<>(Arrays.asList(""));
        try {
            switch (request[0]) {
                case "version": return Arrays.asList("", "ok", "JDBC " + DriverInfo.DRIVER_VERSION + ", HikariCP");
                case "place_order":
                    Orders.placeOrder(pool, Integer.parseInt(request[1].substring(2)));
                    return Arrays.asList("", "ok");
                default: return run(pool, answer, request);
            }
        } catch (SQLException | InterruptedException error) {
            answer.subList(1, answer.size()).clear();
            answer.addAll(Arrays.asList("error", error.getClass().getName()));
            if (error instanceof PSQLException && ((PSQLException) error).getServerErrorMessage() != null) {
                ServerErrorMessage fields = ((PSQLException) error).getServerErrorMessage();
                answer.addAll(Arrays.asList(((PSQLException) error).getSQLState(), Orders.retryAfter((PSQLException) error),
                    fields.getMessage(), fields.getDetail(), fields.getHint(),
                    fields.getSchema(), fields.getTable(), fields.getConstraint()));
            } else {
                answer.addAll(Arrays.asList("", "", error.getMessage(), "", "", "", "", ""));
            }
            return answer;
        }
    }

    public static void main(String[] arguments) throws Exception {
        HikariConfig config = new HikariConfig();
        config.setJdbcUrl("jdbc:postgresql://" + System.getenv("PGHOST") + ":" + System.getenv("PGPORT") + "/"
            + System.getenv("PGDATABASE") + (System.getenv("POOLER") == null ? "" : "?prepareThreshold=0"));
        config.setUsername(System.getenv("PGUSER"));
        config.setMaximumPoolSize(1);
        try (HikariDataSource pool = new HikariDataSource(config)) {
            BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
            for (String line; (line = input.readLine()) != null;) {
                System.out.println(answer(pool, line.split("\t")).stream()
                    .map(field -> field == null ? "" : field.toString().replace("\n", "\\n"))
                    .collect(Collectors.joining("\t")));
            }
        }
    }
}

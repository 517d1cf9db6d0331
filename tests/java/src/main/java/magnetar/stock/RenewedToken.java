package magnetar.stock;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.Serializable;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.Supplier;

/**
 * A token that another program renews: the argument {@code token} until {@code renewedAtMs}, then {@code nextToken}.
 * The client asks for it whenever it connects and whenever the broker challenges it.
 */
final class RenewedToken implements Supplier<String>, Serializable {
    private final String token;
    private final String nextToken;
    private final long renewedAtMs;
    private final AtomicInteger renewals = new AtomicInteger();

    private RenewedToken(String token, String nextToken, long renewedAtMs) {
        this.token = token;
        this.nextToken = nextToken;
        this.renewedAtMs = renewedAtMs;
    }

    static RenewedToken of(JsonNode args) {
        return new RenewedToken(
                args.get("token").asText(), args.get("nextToken").asText(), args.get("renewedAtMs").asLong());
    }

    @Override
    public String get() {
        if (System.currentTimeMillis() < renewedAtMs) {
            return token;
        }
        renewals.incrementAndGet();
        return nextToken;
    }

    /** How often the client has asked since the token was renewed. */
    int renewals() {
        return renewals.get();
    }
}

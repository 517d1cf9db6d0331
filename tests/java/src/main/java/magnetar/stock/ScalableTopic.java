package magnetar.stock;

/** A scalable topic's names: {@code topic://tenant/ns/local} for clients, {@code tenant/ns/local} for REST. */
record ScalableTopic(String path) {
    String name() {
        return "topic://" + path;
    }

    /** The same topic asked for as an ordinary one. */
    String persistentName() {
        return "persistent://" + path;
    }
}

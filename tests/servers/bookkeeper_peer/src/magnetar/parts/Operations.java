package magnetar.parts;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.IOException;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.bookkeeper.client.api.BKException;
import org.apache.bookkeeper.client.api.BookKeeper;
import org.apache.bookkeeper.client.api.DigestType;
import org.apache.bookkeeper.client.api.LedgerEntries;
import org.apache.bookkeeper.client.api.LedgerEntry;
import org.apache.bookkeeper.client.api.LedgerMetadata;
import org.apache.bookkeeper.client.api.ListLedgersResult;
import org.apache.bookkeeper.client.api.ReadHandle;
import org.apache.bookkeeper.client.api.WriteHandle;
import org.apache.bookkeeper.conf.ClientConfiguration;

/** What can be asked for. Clients and handles are numbered; bytes travel in Base64. */
final class Operations {
    private final AtomicLong numbers = new AtomicLong();
    private final Map<Long, BookKeeper> clients = new ConcurrentHashMap<>();
    private final Map<Long, ReadHandle> handles = new ConcurrentHashMap<>();

    void run(JsonNode request, ObjectNode facts) throws Exception {
        String operation = request.get("op").asText();
        switch (operation) {
            case "connect" -> connect(request, facts);
            case "disconnect" -> clients.remove(request.get("client").asLong()).close();
            case "create" -> create(request, facts);
            case "open" -> open(request, facts);
            case "delete" -> client(request).newDeleteLedgerOp().withLedgerId(ledger(request)).execute().get();
            case "list" -> list(request, facts);
            case "metadata" -> metadata(client(request).getLedgerMetadata(ledger(request)).get(), facts);
            case "add" -> add(request, facts);
            case "read" -> read(request, facts);
            case "batch_read" -> batchRead(request, facts);
            case "last_add_confirmed" -> facts.put("lastAddConfirmed", handle(request).readLastAddConfirmed());
            case "close" -> handles.remove(request.get("handle").asLong()).close();
            default -> throw new IllegalArgumentException("no operation " + operation);
        }
    }

    private void connect(JsonNode request, ObjectNode facts) throws BKException, InterruptedException, IOException {
        ClientConfiguration configuration = new ClientConfiguration();
        configuration.setMetadataServiceUri(request.get("uri").asText());
        configuration.setUseV2WireProtocol(request.get("v2").asBoolean());
        configuration.setNumIOThreads(1);
        configuration.setNumWorkerThreads(1);
        request.get("settings").properties().forEach(
                setting -> configuration.setProperty(setting.getKey(), setting.getValue().asText()));
        facts.put("client", kept(clients, BookKeeper.newBuilder(configuration).build()));
    }

    private void create(JsonNode request, ObjectNode facts) throws InterruptedException, ExecutionException {
        Map<String, byte[]> custom = new HashMap<>();
        request.get("customMetadata").properties().forEach(
                entry -> custom.put(entry.getKey(), bytes(entry.getValue())));
        WriteHandle created = client(request).newCreateLedgerOp()
                .withEnsembleSize(request.get("ensembleSize").asInt())
                .withWriteQuorumSize(request.get("writeQuorumSize").asInt())
                .withAckQuorumSize(request.get("ackQuorumSize").asInt())
                .withDigestType(DigestType.valueOf(request.get("digestType").asText()))
                .withPassword(bytes(request.get("password")))
                .withCustomMetadata(custom)
                .execute().get();
        describe(created, facts);
    }

    private void open(JsonNode request, ObjectNode facts) throws InterruptedException, ExecutionException {
        ReadHandle opened = client(request).newOpenLedgerOp()
                .withLedgerId(ledger(request))
                .withRecovery(request.get("recover").asBoolean())
                .withDigestType(DigestType.valueOf(request.get("digestType").asText()))
                .withPassword(bytes(request.get("password")))
                .execute().get();
        describe(opened, facts);
    }

    private void describe(ReadHandle handle, ObjectNode facts) {
        facts.put("handle", kept(handles, handle));
        facts.put("ledger", handle.getId());
        facts.put("lastAddConfirmed", handle.getLastAddConfirmed());
        facts.put("length", handle.getLength());
        facts.put("closed", handle.isClosed());
    }

    private void list(JsonNode request, ObjectNode facts) throws Exception {
        ArrayNode ids = facts.putArray("ledgers");
        ListLedgersResult ledgers = client(request).newListLedgersOp().execute().get();
        try {
            ledgers.toIterable().forEach(ids::add);
        } finally {
            ledgers.close();
        }
    }

    private static void metadata(LedgerMetadata metadata, ObjectNode facts) {
        facts.put("ensembleSize", metadata.getEnsembleSize());
        facts.put("writeQuorumSize", metadata.getWriteQuorumSize());
        facts.put("ackQuorumSize", metadata.getAckQuorumSize());
        facts.put("state", metadata.getState().name());
        facts.put("lastEntryId", metadata.getLastEntryId());
        facts.put("length", metadata.getLength());
        facts.put("digestType", metadata.getDigestType().name());
        facts.put("password", metadata.hasPassword() ? text(metadata.getPassword()) : "");
        ObjectNode ensembles = facts.putObject("ensembles");
        metadata.getAllEnsembles().forEach((first, bookies) -> {
            ArrayNode members = ensembles.putArray(first.toString());
            bookies.forEach(bookie -> members.add(bookie.toString()));
        });
        ObjectNode custom = facts.putObject("customMetadata");
        metadata.getCustomMetadata().forEach((key, value) -> custom.put(key, text(value)));
    }

    /** Sends all entries at once; those before the first that fails are told too. */
    private void add(JsonNode request, ObjectNode facts) throws InterruptedException, ExecutionException {
        WriteHandle writer = (WriteHandle) handle(request);
        List<CompletableFuture<Long>> sent = new ArrayList<>();
        request.get("entries").forEach(entry -> sent.add(writer.appendAsync(bytes(entry))));
        ArrayNode acknowledged = facts.putArray("acknowledged");
        for (CompletableFuture<Long> entry : sent) {
            acknowledged.add(entry.get().longValue());
        }
    }

    private void read(JsonNode request, ObjectNode facts) throws InterruptedException, ExecutionException {
        ReadHandle handle = handle(request);
        long first = request.get("first").asLong();
        long last = request.get("last").asLong();
        boolean unconfirmed = request.get("unconfirmed").asBoolean();
        tell(unconfirmed ? handle.readUnconfirmedAsync(first, last) : handle.readAsync(first, last), facts);
    }

    private void batchRead(JsonNode request, ObjectNode facts) throws InterruptedException, ExecutionException {
        long first = request.get("first").asLong();
        int count = request.get("maxCount").asInt();
        tell(handle(request).batchReadAsync(first, count, request.get("maxBytes").asLong()), facts);
    }

    private static void tell(CompletableFuture<LedgerEntries> reading, ObjectNode facts)
            throws InterruptedException, ExecutionException {
        try (LedgerEntries entries = reading.get()) {
            ArrayNode told = facts.putArray("entries");
            for (LedgerEntry entry : entries) {
                told.addObject()
                        .put("entry", entry.getEntryId())
                        .put("length", entry.getLength())
                        .put("data", text(entry.getEntryBytes()));
            }
        }
    }

    private BookKeeper client(JsonNode request) {
        return found(clients, request.get("client").asLong());
    }

    private ReadHandle handle(JsonNode request) {
        return found(handles, request.get("handle").asLong());
    }

    private static long ledger(JsonNode request) {
        return request.get("ledger").asLong();
    }

    private <T> long kept(Map<Long, T> things, T thing) {
        long number = numbers.incrementAndGet();
        things.put(number, thing);
        return number;
    }

    private static <T> T found(Map<Long, T> things, long number) {
        T thing = things.get(number);
        if (thing == null) {
            throw new IllegalArgumentException("nothing open has the number " + number);
        }
        return thing;
    }

    private static byte[] bytes(JsonNode node) {
        return Base64.getDecoder().decode(node.asText());
    }

    private static String text(byte[] bytes) {
        return Base64.getEncoder().encodeToString(bytes);
    }
}

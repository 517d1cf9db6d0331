package magnetar.stock;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.api.CompressionType;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.impl.MessageIdImpl;

/** Single messages of a topic, as the admin library asks for them and reads them. */
final class V4Messages {
    private static final int BATCHED = 3;
    private static final long EVENT_TIME_MS = 1_700_000_000_123L;

    private V4Messages() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("v4_single_messages", V4Messages::single);
    }

    private static void single(CaseRun run) throws Exception {
        PulsarAdmin admin = run.closing(PulsarAdmin.builder().serviceHttpUrl(run.arg("web", "")).build());
        PulsarClient client = run.closing(PulsarClient.builder().serviceUrl(run.url()).build());
        String topic = "persistent://public/default/" + run.localName();
        admin.topics().createNonPartitionedTopic(topic);
        admin.topics().createSubscription(topic, "s", MessageId.earliest);
        MessageIdImpl first;
        try (Producer<String> producer = client.newProducer(Schema.STRING).topic(topic).producerName("alone")
                .enableBatching(false).compressionType(CompressionType.LZ4).create()) {
            first = (MessageIdImpl) producer.newMessage().key("k").property("a", "b").eventTime(EVENT_TIME_MS)
                    .value("alone").send();
        }
        try (Producer<String> producer = client.newProducer(Schema.STRING).topic(topic)
                .batchingMaxPublishDelay(1, TimeUnit.MINUTES).compressionType(CompressionType.ZSTD).create()) {
            List<CompletableFuture<MessageId>> sends = new ArrayList<>();
            for (int i = 0; i < BATCHED; i++) {
                sends.add(producer.newMessage().key("b" + i).value("batched " + i).sendAsync());
            }
            producer.flush();
            for (CompletableFuture<MessageId> each : sends) {
                each.get();
            }
        }
        run.fact("peeked", texts(admin.topics().peekMessages(topic, "s", 10)));
        Message<byte[]> alone = admin.topics().getMessageById(topic, first.getLedgerId(), first.getEntryId());
        run.fact("alone", new String(alone.getValue()));
        run.fact("key", alone.getKey());
        run.fact("property", alone.getProperty("a"));
        run.fact("producer", alone.getProducerName());
        run.fact("event_time", alone.getEventTime() == EVENT_TIME_MS);
        run.fact("published", alone.getPublishTime() > EVENT_TIME_MS);
        run.fact("first", new String(admin.topics().examineMessage(topic, "earliest", 1).getValue()));
        run.fact("last", new String(admin.topics().examineMessage(topic, "latest", 1).getValue()));
        MessageId since = admin.topics().getMessageIdByTimestamp(topic, alone.getPublishTime());
        run.fact("id_since_its_time", since.equals(first));
        run.fact("bytes_from_it_on", admin.topics().getBacklogSizeByMessageId(topic, first) > 0);
        admin.topics().trimTopic(topic);
        admin.topics().skipMessages(topic, "s", 1);
        run.fact("after_skip", texts(admin.topics().peekMessages(topic, "s", 10)));
        admin.topics().createPartitionedTopic(topic + "-parts", 2);
        run.fact("terminated", admin.topics().terminatePartitionedTopic(topic + "-parts").size());
    }

    private static List<String> texts(List<Message<byte[]>> messages) {
        return messages.stream().map(each -> new String(each.getValue())).toList();
    }
}

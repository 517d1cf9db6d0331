package magnetar.stock;

import com.fasterxml.jackson.databind.node.JsonNodeFactory;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.lang.reflect.Method;
import java.util.Map;
import java.util.TreeMap;
import org.apache.pulsar.client.api.MessageIdAdv;
import org.apache.pulsar.client.api.v5.Checkpoint;
import org.apache.pulsar.client.api.v5.MessageId;

/** What the client itself makes of the bytes of a message id or checkpoint. */
final class InteropIds {
    private static final JsonNodeFactory NODES = JsonNodeFactory.instance;

    private InteropIds() {
    }

    static ObjectNode explained(MessageId id) {
        ObjectNode told = NODES.objectNode();
        told.put("text", id.toString()).put("segment_id", (long) inside(id, "segmentId"));
        told.set("position", position(inside(id, "v4MessageId")));
        told.set("position_vector", vector(inside(id, "positionVector")));
        told.put("parent_topic", (String) inside(id, "parentTopic"));
        Map<?, ?> topics = (Map<?, ?>) inside(id, "multiTopicVector");
        if (topics != null) {
            ObjectNode vectors = told.putObject("topic_vectors");
            topics.forEach((topic, positions) -> vectors.set((String) topic, vector(positions)));
        }
        return told;
    }

    static ObjectNode explained(Checkpoint checkpoint) {
        ObjectNode told = NODES.objectNode();
        boolean earliest = checkpoint == Checkpoint.earliest();
        boolean latest = checkpoint == Checkpoint.latest();
        if (!earliest && !latest) {
            told.set("positions", vector(inside(checkpoint, "segmentPositions")));
        }
        told.put("earliest", earliest).put("latest", latest);
        return told;
    }

    private static ObjectNode vector(Object positions) {
        ObjectNode told = NODES.objectNode();
        if (positions instanceof Map<?, ?> map) {
            new TreeMap<Object, Object>(map).forEach((segment, id) -> told.set(segment.toString(), position(id)));
        }
        return told;
    }

    private static ObjectNode position(Object id) {
        ObjectNode told = NODES.objectNode().put("class", id.getClass().getSimpleName());
        if (id instanceof MessageIdAdv adv) {
            told.put("ledger_id", adv.getLedgerId())
                    .put("entry_id", adv.getEntryId())
                    .put("partition", adv.getPartitionIndex())
                    .put("batch_index", adv.getBatchIndex())
                    .put("batch_size", adv.getBatchSize());
            if (adv.getFirstChunkMessageId() != null) {
                told.set("first_chunk", position(adv.getFirstChunkMessageId()));
            }
        }
        return told;
    }

    private static Object inside(Object from, String name) {
        try {
            Method method = from.getClass().getDeclaredMethod(name);
            method.setAccessible(true);
            return method.invoke(from);
        } catch (ReflectiveOperationException failure) {
            throw new IllegalStateException(failure);
        }
    }
}

package magnetar.stock;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.JsonNodeFactory;
import com.fasterxml.jackson.databind.node.ObjectNode;
import com.google.protobuf.EnumValue;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.math.BigDecimal;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.apache.pulsar.client.api.v5.schema.Field;
import org.apache.pulsar.client.api.v5.schema.GenericRecord;
import org.apache.pulsar.client.api.v5.schema.Schema;
import org.apache.pulsar.client.api.v5.schema.SchemaInfo;

/** The schemas that an interop session knows by name, and their values to and from JSON. */
final class InteropSchemas {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final JsonNodeFactory NODES = JsonNodeFactory.instance;

    /** A schema, and how its values are told in orders and answers. */
    record Kind<T>(Schema<T> schema, FromJson<T> fromJson, ToJson<T> toJson) {
        byte[] encode(JsonNode value) throws IOException {
            return schema.encode(fromJson.apply(value));
        }

        JsonNode decode(byte[] bytes) throws IOException {
            return toJson.apply(schema.decode(bytes));
        }
    }

    /** A value from JSON. */
    @FunctionalInterface
    interface FromJson<T> {
        T apply(JsonNode value) throws IOException;
    }

    /** A value to JSON. */
    @FunctionalInterface
    interface ToJson<T> {
        JsonNode apply(T value) throws IOException;
    }

    /** What a measuring station is in. */
    public enum State {
        IDLE, RUNNING, BROKEN
    }

    /** A record inside a record. */
    public static class Place {
        public String city;
        public double latitude;
        public double longitude;
    }

    /** One of each kind of field, primitive and boxed. */
    public static class Reading {
        public String sensor;
        public int value;
        public long total;
        public float ratio;
        public double exact;
        public boolean valid;
        public Integer maybe;
        public byte[] raw;
        public List<String> tags;
        public Map<String, Long> counts;
        public State state;
        public Place place;
        public List<Place> route;
    }

    /** The smallest record worth the name. */
    public static class Point {
        public String name;
        public int x;
    }

    /** A {@link Point} that has grown a field since. */
    public static class PointWithUnit {
        public String name;
        public int x;
        public String unit;
    }

    /** Numbers narrower than an int, and those that JSON cannot tell exactly. */
    public static class Oddments {
        public short small;
        public byte tiny;
        public BigDecimal amount;
    }

    private static final Map<String, Kind<?>> KINDS = kinds();

    private InteropSchemas() {
    }

    private static Map<String, Kind<?>> kinds() {
        Map<String, Kind<?>> kinds = new TreeMap<>();
        kinds.put("bytes", new Kind<>(Schema.bytes(), JsonNode::binaryValue, NODES::binaryNode));
        kinds.put("string", new Kind<>(Schema.string(), JsonNode::asText, NODES::textNode));
        kinds.put("bool", new Kind<>(Schema.bool(), JsonNode::asBoolean, NODES::booleanNode));
        kinds.put("int8", new Kind<Byte>(Schema.int8(), value -> (byte) value.asInt(), NODES::numberNode));
        kinds.put("int16", new Kind<Short>(Schema.int16(), value -> (short) value.asInt(), NODES::numberNode));
        kinds.put("int32", new Kind<Integer>(Schema.int32(), JsonNode::asInt, NODES::numberNode));
        kinds.put("int64", new Kind<Long>(Schema.int64(), JsonNode::asLong, NODES::numberNode));
        kinds.put("float32", new Kind<Float>(Schema.float32(), value -> (float) value.asDouble(), NODES::numberNode));
        kinds.put("float64", new Kind<Double>(Schema.float64(), JsonNode::asDouble, NODES::numberNode));
        kinds.put("json_point", record(Schema.json(Point.class), Point.class));
        kinds.put("json_point_with_unit", record(Schema.json(PointWithUnit.class), PointWithUnit.class));
        kinds.put("json_reading", record(Schema.json(Reading.class), Reading.class));
        kinds.put("json_oddments", record(Schema.json(Oddments.class), Oddments.class));
        kinds.put("avro_point", record(Schema.avro(Point.class), Point.class));
        kinds.put("avro_point_with_unit", record(Schema.avro(PointWithUnit.class), PointWithUnit.class));
        kinds.put("avro_reading", record(Schema.avro(Reading.class), Reading.class));
        kinds.put("protobuf", new Kind<>(Schema.protobuf(EnumValue.class), InteropSchemas::enumValue, InteropSchemas::told));
        kinds.put("auto", new Kind<GenericRecord>(Schema.autoConsume(), value -> {
            throw new IllegalArgumentException("a schema for reading");
        }, InteropSchemas::told));
        return kinds;
    }

    private static <T> Kind<T> record(Schema<T> schema, Class<T> type) {
        return new Kind<>(schema, value -> JSON.treeToValue(value, type), JSON::valueToTree);
    }

    static Kind<?> named(String name) {
        Kind<?> kind = KINDS.get(name);
        if (kind == null) {
            throw new IllegalArgumentException("no schema " + name + "; there are " + KINDS.keySet());
        }
        return kind;
    }

    /** What the client registers. */
    static ObjectNode told(SchemaInfo info) {
        ObjectNode told = NODES.objectNode()
                .put("name", info.name())
                .put("type", info.type().name())
                .put("data", new String(info.schema(), StandardCharsets.UTF_8));
        told.set("properties", JSON.valueToTree(new TreeMap<>(info.properties())));
        return told;
    }

    private static EnumValue enumValue(JsonNode value) {
        return EnumValue.newBuilder()
                .setName(value.path("name").asText())
                .setNumber(value.path("number").asInt())
                .build();
    }

    private static JsonNode told(EnumValue value) {
        return NODES.objectNode().put("name", value.getName()).put("number", value.getNumber());
    }

    private static JsonNode told(GenericRecord record) {
        ObjectNode told = NODES.objectNode();
        for (Field field : record.fields()) {
            Object value = record.field(field.name());
            try {
                told.set(field.name(), JSON.readTree(JSON.writeValueAsBytes(
                        value instanceof CharSequence text ? text.toString() : value)));
            } catch (IOException failure) {
                throw new UncheckedIOException(failure);
            }
        }
        return told;
    }
}

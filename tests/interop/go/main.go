// First programs of pulsar-client-go and its pulsaradmin, as their users write them.
//
// Arguments: the service URL (binary or HTTP), the URL of the REST interface, a namespace that is
// not there yet. Each step prints one line, "ok NAME" or "failed NAME: why"; a step that failed does
// not keep the next ones from running. "done" is the last line.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
	"github.com/apache/pulsar-client-go/pulsaradmin"
	"github.com/apache/pulsar-client-go/pulsaradmin/pkg/admin"
	"github.com/apache/pulsar-client-go/pulsaradmin/pkg/utils"
)

const (
	count    = 10
	patience = 20 * time.Second
)

type measurement struct {
	Sensor string `json:"sensor" avro:"sensor"`
	Value  int    `json:"value" avro:"value"`
}

const measurementAvro = `{"type": "record", "name": "Measurement", "fields": [
	{"name": "sensor", "type": "string"}, {"name": "value", "type": "int"}]}`

// program is what the steps share.
type program struct {
	client    pulsar.Client
	admin     admin.Client
	namespace string
}

func main() {
	client, err := pulsar.NewClient(pulsar.ClientOptions{URL: os.Args[1], OperationTimeout: 10 * time.Second})
	if err != nil {
		panic(err)
	}
	defer client.Close()
	admin, err := pulsaradmin.NewClient(&pulsaradmin.Config{WebServiceURL: os.Args[2]})
	if err != nil {
		panic(err)
	}
	p := program{client, admin, os.Args[3]}
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"namespace", p.makesNamespace},
		{"tenant", p.makesTenant},
		{"partitioned topic", p.makesPartitionedTopic},
		{"exclusive", p.of("exclusive", pulsar.Exclusive)},
		{"shared", p.of("shared", pulsar.Shared)},
		{"failover", p.of("failover", pulsar.Failover)},
		{"key shared", p.of("key-shared", pulsar.KeyShared)},
		{"partitions", p.of("partitioned", pulsar.Shared)},
		{"string", p.sendsStrings},
		{"json", p.sendsJSON},
		{"avro", p.sendsAvro},
		{"reader", p.readsRanges},
		{"reader of partitions", p.readsPartitions},
		{"batches, compressed", p.sendsBatches},
		{"dead letters", p.refusesTooOften},
		{"transactions", p.commitsAndAborts},
		{"pattern", p.followsPattern},
		{"statistics", p.asksForStatistics},
		{"subscription", p.makesSubscription},
		{"schema", p.asksForSchema},
		{"brokers", p.asksForBrokers},
		{"unload", p.unloads},
		{"delete", p.deletesTopic},
	} {
		if err := step.do(); err != nil {
			fmt.Printf("failed %s: %v\n", step.name, err)
		} else {
			fmt.Printf("ok %s\n", step.name)
		}
	}
	fmt.Println("done")
}

func (p program) topic(name string) string {
	return "persistent://" + p.namespace + "/" + name
}

func (p program) topicName(name string) utils.TopicName {
	parsed, err := utils.GetTopicName(p.topic(name))
	if err != nil {
		panic(err)
	}
	return *parsed
}

func (p program) namespaceName() utils.NameSpaceName {
	parsed, err := utils.GetNamespaceName(p.namespace)
	if err != nil {
		panic(err)
	}
	return *parsed
}

func inTime() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), patience)
}

func expect[T comparable](what string, found, expected T) error {
	if found != expected {
		return fmt.Errorf("%s: found %v, not %v", what, found, expected)
	}
	return nil
}

// Topics and namespaces

func (p program) makesNamespace() error {
	namespaces := p.admin.Namespaces()
	if err := namespaces.CreateNsWithPolices(p.namespace, *utils.NewDefaultPolicies()); err != nil {
		return err
	}
	if err := namespaces.SetRetention(p.namespace, utils.NewRetentionPolicies(10, 100)); err != nil {
		return err
	}
	creation := utils.TopicAutoCreationConfig{Allow: true, Type: utils.NonPartitioned}
	if err := namespaces.SetTopicAutoCreation(p.namespaceName(), creation); err != nil {
		return err
	}
	policies, err := namespaces.GetPolicies(p.namespace)
	if err != nil {
		return err
	}
	return expect("minutes kept", policies.RetentionPolicies.RetentionTimeInMinutes, 10)
}

func (p program) makesTenant() error {
	name := strings.ReplaceAll(p.namespace, "/", "-")
	given := utils.TenantData{Name: name, AdminRoles: []string{"me"}, AllowedClusters: []string{"standalone"}}
	if err := p.admin.Tenants().Create(given); err != nil {
		return err
	}
	found, err := p.admin.Tenants().Get(name)
	if err != nil {
		return err
	}
	if err := expect("roles", len(found.AdminRoles), 1); err != nil {
		return err
	}
	return p.admin.Tenants().Delete(name)
}

func (p program) makesPartitionedTopic() error {
	topic := p.topicName("partitioned")
	if err := p.admin.Topics().Create(topic, 3); err != nil {
		return err
	}
	if err := p.admin.Topics().Update(topic, 4); err != nil {
		return err
	}
	metadata, err := p.admin.Topics().GetMetadata(topic)
	if err != nil {
		return err
	}
	partitioned, _, err := p.admin.Topics().List(p.namespaceName())
	if err != nil {
		return err
	}
	return errors.Join(
		expect("partitions", metadata.Partitions, 4),
		expect("listed", slices.Contains(partitioned, topic.String()), true),
	)
}

func (p program) deletesTopic() error {
	if err := p.admin.Topics().Delete(p.topicName("partitioned"), true, false); err != nil {
		return err
	}
	partitioned, _, err := p.admin.Topics().List(p.namespaceName())
	return errors.Join(err, expect("partitioned topics", len(partitioned), 0))
}

// Messages

// trip sends a message for each number and has a consumer acknowledge what comes of it.
func (p program) trip(
	name string, kind pulsar.SubscriptionType, schema pulsar.Schema,
	message func(number int) *pulsar.ProducerMessage, numberOf func(pulsar.Message) (int, error),
) error {
	consumer, err := p.client.Subscribe(pulsar.ConsumerOptions{
		Topic: p.topic(name), SubscriptionName: "first", Type: kind, Schema: schema,
	})
	if err != nil {
		return err
	}
	defer consumer.Close()
	producer, err := p.client.CreateProducer(pulsar.ProducerOptions{Topic: p.topic(name), Schema: schema})
	if err != nil {
		return err
	}
	defer producer.Close()
	ctx, cancel := inTime()
	defer cancel()
	for number := range count {
		if _, err := producer.Send(ctx, message(number)); err != nil {
			return err
		}
	}
	seen := map[int]bool{}
	for range count {
		received, err := consumer.Receive(ctx)
		if err != nil {
			return err
		}
		number, err := numberOf(received)
		if err != nil {
			return err
		}
		seen[number] = true
		if err := consumer.Ack(received); err != nil {
			return err
		}
	}
	return expect("different messages", len(seen), count)
}

func plain(number int) *pulsar.ProducerMessage {
	text := strconv.Itoa(number)
	return &pulsar.ProducerMessage{Payload: []byte(text), Key: text}
}

func numberOf(received pulsar.Message) (int, error) {
	return strconv.Atoi(string(received.Payload()))
}

func (p program) of(name string, kind pulsar.SubscriptionType) func() error {
	return func() error { return p.trip(name, kind, nil, plain, numberOf) }
}

func (p program) sendsStrings() error {
	return p.trip("string", pulsar.Exclusive, pulsar.NewStringSchema(nil),
		func(number int) *pulsar.ProducerMessage {
			return &pulsar.ProducerMessage{Value: strconv.Itoa(number)}
		},
		func(received pulsar.Message) (int, error) {
			var text *string
			if err := received.GetSchemaValue(&text); err != nil {
				return 0, err
			}
			return strconv.Atoi(*text)
		})
}

func (p program) sendsMeasurements(name string, schema pulsar.Schema) error {
	return p.trip(name, pulsar.Exclusive, schema,
		func(number int) *pulsar.ProducerMessage {
			return &pulsar.ProducerMessage{Value: &measurement{"a", number}}
		},
		func(received pulsar.Message) (int, error) {
			var found measurement
			err := received.GetSchemaValue(&found)
			return found.Value, errors.Join(err, expect("sensor", found.Sensor, "a"))
		})
}

func (p program) sendsJSON() error {
	return p.sendsMeasurements("json", pulsar.NewJSONSchema(measurementAvro, nil))
}

func (p program) sendsAvro() error {
	return p.sendsMeasurements("avro", pulsar.NewAvroSchema(measurementAvro, nil))
}

func (p program) sendsBatches() error {
	producer, err := p.client.CreateProducer(pulsar.ProducerOptions{
		Topic: p.topic("batches"), CompressionType: pulsar.LZ4, BatchingMaxPublishDelay: 5 * time.Millisecond,
	})
	if err != nil {
		return err
	}
	defer producer.Close()
	refused := make(chan error, 10*count)
	for number := range 10 * count {
		producer.SendAsync(context.Background(), plain(number),
			func(_ pulsar.MessageID, _ *pulsar.ProducerMessage, err error) { refused <- err })
	}
	if err := producer.Flush(); err != nil {
		return err
	}
	for range 10 * count {
		if err := <-refused; err != nil {
			return err
		}
	}
	found, err := p.read("batches", pulsar.EarliestMessageID(), false)
	return errors.Join(err, expect("messages", len(found), 10*count))
}

func (p program) refusesTooOften() error {
	const often = 2
	dead, err := p.client.Subscribe(pulsar.ConsumerOptions{Topic: p.topic("dead"), SubscriptionName: "first"})
	if err != nil {
		return err
	}
	defer dead.Close()
	consumer, err := p.client.Subscribe(pulsar.ConsumerOptions{
		Topic: p.topic("refused"), SubscriptionName: "first", Type: pulsar.Shared,
		NackRedeliveryDelay: 100 * time.Millisecond,
		DLQ:                 &pulsar.DLQPolicy{MaxDeliveries: often, DeadLetterTopic: p.topic("dead")},
	})
	if err != nil {
		return err
	}
	defer consumer.Close()
	producer, err := p.client.CreateProducer(pulsar.ProducerOptions{Topic: p.topic("refused")})
	if err != nil {
		return err
	}
	defer producer.Close()
	ctx, cancel := inTime()
	defer cancel()
	if _, err := producer.Send(ctx, plain(7)); err != nil {
		return err
	}
	for before := range uint32(often) {
		received, err := consumer.Receive(ctx)
		if err != nil {
			return err
		}
		if err := expect("redeliveries", received.RedeliveryCount(), before); err != nil {
			return err
		}
		consumer.Nack(received)
	}
	received, err := dead.Receive(ctx)
	if err != nil {
		return err
	}
	return errors.Join(expect("dead letter", string(received.Payload()), "7"), dead.Ack(received))
}

// commitsAndAborts acknowledges a message and sends one in each of two transactions, of which it
// aborts the first: then the message comes again, and what was sent is never seen.
func (p program) commitsAndAborts() error {
	client, err := pulsar.NewClient(pulsar.ClientOptions{
		URL: os.Args[1], OperationTimeout: 10 * time.Second, EnableTransaction: true,
	})
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := inTime()
	defer cancel()
	subscribe := func(topic string) (pulsar.Consumer, error) {
		return client.Subscribe(pulsar.ConsumerOptions{
			Topic: p.topic(topic), SubscriptionName: "first", Type: pulsar.Shared,
			SubscriptionInitialPosition: pulsar.SubscriptionPositionEarliest,
		})
	}
	producers := map[string]pulsar.Producer{}
	consumers := map[string]pulsar.Consumer{}
	for _, topic := range []string{"txn-in", "txn-out"} {
		producer, err := client.CreateProducer(pulsar.ProducerOptions{Topic: p.topic(topic)})
		if err != nil {
			return err
		}
		defer producer.Close()
		consumer, err := subscribe(topic)
		if err != nil {
			return err
		}
		defer consumer.Close()
		producers[topic], consumers[topic] = producer, consumer
	}
	if _, err := producers["txn-in"].Send(ctx, plain(1)); err != nil {
		return err
	}
	for number, commit := range []bool{false, true} {
		received, err := consumers["txn-in"].Receive(ctx)
		if err != nil {
			return err
		}
		txn, err := client.NewTransaction(time.Minute)
		if err != nil {
			return err
		}
		message := plain(number)
		message.Transaction = txn
		if _, err := producers["txn-out"].Send(ctx, message); err != nil {
			return err
		}
		if err := consumers["txn-in"].AckWithTxn(received, txn); err != nil {
			return err
		}
		end := txn.Abort
		if commit {
			end = txn.Commit
		}
		if err := end(ctx); err != nil {
			return err
		}
	}
	received, err := consumers["txn-out"].Receive(ctx)
	if err != nil {
		return err
	}
	number, err := numberOf(received)
	return errors.Join(err, expect("the message of the commit", number, 1))
}

func (p program) followsPattern() error {
	consumer, err := p.client.Subscribe(pulsar.ConsumerOptions{
		TopicsPattern: p.topic("(exclusive|failover)"), SubscriptionName: "pattern",
		SubscriptionInitialPosition: pulsar.SubscriptionPositionEarliest,
	})
	if err != nil {
		return err
	}
	defer consumer.Close()
	ctx, cancel := inTime()
	defer cancel()
	from := map[string]int{}
	for range 2 * count {
		received, err := consumer.Receive(ctx)
		if err != nil {
			return err
		}
		from[received.Topic()]++
		if err := consumer.Ack(received); err != nil {
			return err
		}
	}
	return errors.Join(
		expect("messages of the first topic", from[p.topic("exclusive")], count),
		expect("messages of the second topic", from[p.topic("failover")], count),
	)
}

// Readers

// read returns all that a reader gets from there on.
func (p program) read(name string, start pulsar.MessageID, inclusive bool) ([]pulsar.Message, error) {
	reader, err := p.client.CreateReader(pulsar.ReaderOptions{
		Topic: p.topic(name), StartMessageID: start, StartMessageIDInclusive: inclusive,
	})
	if err != nil {
		return nil, err
	}
	defer reader.Close()
	return rest(reader)
}

func rest(reader pulsar.Reader) ([]pulsar.Message, error) {
	ctx, cancel := inTime()
	defer cancel()
	var found []pulsar.Message
	for reader.HasNext() {
		message, err := reader.Next(ctx)
		if err != nil {
			return found, err
		}
		found = append(found, message)
	}
	return found, nil
}

func (p program) readsRanges() error {
	all, err := p.read("exclusive", pulsar.EarliestMessageID(), false)
	if err != nil {
		return err
	}
	if err := expect("messages", len(all), count); err != nil {
		return err
	}
	after, err := p.read("exclusive", all[4].ID(), false)
	if err != nil {
		return err
	}
	from, err := p.read("exclusive", all[4].ID(), true)
	if err != nil {
		return err
	}
	reader, err := p.client.CreateReader(pulsar.ReaderOptions{
		Topic: p.topic("exclusive"), StartMessageID: pulsar.LatestMessageID(),
	})
	if err != nil {
		return err
	}
	defer reader.Close()
	if err := expect("something after the last one", reader.HasNext(), false); err != nil {
		return err
	}
	if err := reader.SeekByTime(time.Now().Add(-time.Hour)); err != nil {
		return err
	}
	again, err := rest(reader)
	return errors.Join(
		err,
		expect("messages after the fifth", len(after), count-5),
		expect("messages from the fifth on", len(from), count-4),
		expect("messages since an hour ago", len(again), count),
	)
}

func (p program) readsPartitions() error {
	found, err := p.read("partitioned", pulsar.EarliestMessageID(), false)
	return errors.Join(err, expect("messages", len(found), count))
}

// What the admin client asks for

func (p program) asksForStatistics() error {
	topics := p.admin.Topics()
	stats, err := topics.GetStats(p.topicName("exclusive"))
	if err != nil {
		return err
	}
	whole, err := topics.GetPartitionedStats(p.topicName("partitioned"), true)
	if err != nil {
		return err
	}
	internal, err := topics.GetInternalStats(p.topicName("exclusive"))
	if err != nil {
		return err
	}
	_, err = topics.GetLastMessageID(p.topicName("exclusive"))
	return errors.Join(
		err,
		expect("backlog", stats.Subscriptions["first"].MsgBacklog, 0),
		expect("partitions", len(whole.Partitions), 4),
		expect("entries", internal.EntriesAddedCounter, count),
	)
}

func (p program) makesSubscription() error {
	topic, subscriptions := p.topicName("exclusive"), p.admin.Subscriptions()
	if err := subscriptions.Create(topic, "made", utils.Earliest); err != nil {
		return err
	}
	if err := subscriptions.ClearBacklog(topic, "made"); err != nil {
		return err
	}
	hourAgo := time.Now().Add(-time.Hour).UnixMilli()
	if err := subscriptions.ResetCursorToTimestamp(topic, "made", hourAgo); err != nil {
		return err
	}
	stats, err := p.admin.Topics().GetStats(topic)
	if err != nil {
		return err
	}
	if err := expect("backlog", stats.Subscriptions["made"].MsgBacklog, count); err != nil {
		return err
	}
	if err := subscriptions.Delete(topic, "made"); err != nil {
		return err
	}
	names, err := subscriptions.List(topic)
	return errors.Join(err, expect("still there", slices.Contains(names, "made"), false))
}

func (p program) asksForSchema() error {
	schemas := p.admin.Schemas()
	found, err := schemas.GetSchemaInfo(p.namespace + "/json")
	if err != nil {
		return err
	}
	payload := utils.PostSchemaPayload{SchemaType: "STRING", Properties: map[string]string{}}
	if err := schemas.CreateSchemaByPayload(p.namespace+"/uploaded", payload); err != nil {
		return err
	}
	uploaded, err := schemas.GetSchemaInfo(p.namespace + "/uploaded")
	if err != nil {
		return err
	}
	return errors.Join(expect("type", found.Type, "JSON"), expect("type", uploaded.Type, "STRING"))
}

func (p program) asksForBrokers() error {
	clusters, err := p.admin.Clusters().List()
	if err != nil {
		return err
	}
	if len(clusters) == 0 {
		return errors.New("no cluster is listed")
	}
	brokers, err := p.admin.Brokers().GetActiveBrokers(clusters[0])
	if err != nil {
		return err
	}
	if err := expect("a broker is listed", len(brokers) > 0, true); err != nil {
		return err
	}
	return p.admin.Brokers().HealthCheck()
}

func (p program) unloads() error {
	if err := p.admin.Namespaces().Unload(p.namespace); err != nil {
		return err
	}
	found, err := p.read("exclusive", pulsar.EarliestMessageID(), false)
	return errors.Join(err, expect("messages", len(found), count))
}

package kalman.stores;

import java.util.Collections;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.connector.read.streaming.Offset;
import org.apache.spark.sql.connector.read.streaming.ReadLimit;
import org.apache.spark.sql.connector.read.streaming.SupportsTriggerAvailableNow;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * A streaming source that the driver's Python plans: for each micro-batch it gives every task one row, a text that says
 * what the task must read. So rows are read by the Python code that uses them, and never pass through Java. The option
 * `planner` names the planner, which the driver registers before it starts the query.
 */
public class PlannedRows implements TableProvider {
    private static final Map PLANNERS = new ConcurrentHashMap();

    /** What the driver's Python answers. Offsets are JSON. */
    public interface Planner {
        /** Return the offset before the first row of a new query. */
        String begin();

        /** Return the end of the micro-batch after an offset, which is that offset if there is nothing to read. */
        String advance(String start);

        /** Let the micro-batches of this run end at the rows that there are now. */
        void bound();

        /** Return the tasks of a micro-batch, one a line. */
        String plan(String start, String end);
    }

    public static void register(String name, Planner planner) {
        PLANNERS.put(name, planner);
    }

    public static void remove(String name) {
        PLANNERS.remove(name);
    }

    public StructType inferSchema(CaseInsensitiveStringMap options) {
        return new StructType().add("task", DataTypes.StringType);
    }

    public Table getTable(StructType schema, Transform[] partitioning, Map properties) {
        return new Rows(schema);
    }

    private static class Rows implements Table, SupportsRead {
        private final StructType schema;

        Rows(StructType schema) {
            this.schema = schema;
        }

        public String name() {
            return "planned rows";
        }

        public StructType schema() {
            return schema;
        }

        public Set capabilities() {
            return Collections.singleton(TableCapability.MICRO_BATCH_READ);
        }

        public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
            return new Reading(schema, options.get("planner"));
        }
    }

    private static class Reading implements ScanBuilder, Scan {
        private final StructType schema;
        private final String planner;

        Reading(StructType schema, String planner) {
            this.schema = schema;
            this.planner = planner;
        }

        public Scan build() {
            return this;
        }

        public StructType readSchema() {
            return schema;
        }

        public String description() {
            return "rows that the driver plans for tasks";
        }

        public MicroBatchStream toMicroBatchStream(String checkpoint) {
            Planner found = (Planner) PLANNERS.get(planner);
            if (found == null) {
                throw new IllegalStateException("no planner " + planner + " in this process");
            }
            return new Stream(found);
        }
    }

    private static class Place extends Offset {
        private final String json;

        Place(String json) {
            this.json = json;
        }

        public String json() {
            return json;
        }
    }

    private static class Stream implements MicroBatchStream, SupportsTriggerAvailableNow {
        private final Planner planner;

        Stream(Planner planner) {
            this.planner = planner;
        }

        public Offset initialOffset() {
            return new Place(planner.begin());
        }

        public Offset deserializeOffset(String json) {
            return new Place(json);
        }

        public Offset latestOffset() {
            throw new UnsupportedOperationException("the end of a micro-batch depends on its start");
        }

        public Offset latestOffset(Offset start, ReadLimit limit) {
            String end = planner.advance(start.json());
            return end.equals(start.json()) ? null : new Place(end);  // null: there is no micro-batch
        }

        public void prepareForTriggerAvailableNow() {
            planner.bound();
        }

        public InputPartition[] planInputPartitions(Offset start, Offset end) {
            String plan = planner.plan(start.json(), end.json());
            String[] tasks = plan.isEmpty() ? new String[0] : plan.split("\n");
            InputPartition[] partitions = new InputPartition[tasks.length];
            for (int i = 0; i < tasks.length; i++) {
                partitions[i] = new Part(tasks[i]);
            }
            return partitions;
        }

        public PartitionReaderFactory createReaderFactory() {
            return new Factory();
        }

        public void commit(Offset end) {
        }

        public void stop() {
        }
    }

    private static class Part implements InputPartition {
        final String task;

        Part(String task) {
            this.task = task;
        }
    }

    private static class Factory implements PartitionReaderFactory {
        public PartitionReader createReader(InputPartition partition) {
            return new OneRow(((Part) partition).task);
        }
    }

    private static class OneRow implements PartitionReader {
        private final String task;
        private boolean given;

        OneRow(String task) {
            this.task = task;
        }

        public boolean next() {
            boolean first = !given;
            given = true;
            return first;
        }

        public Object get() {
            return new GenericInternalRow(new Object[] {UTF8String.fromString(task)});
        }

        public void close() {
        }
    }
}

package kalman.stores;

import java.io.IOException;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataInputStream;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FSDataOutputStreamBuilder;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.PathFilter;
import org.apache.spark.sql.execution.streaming.checkpointing.CheckpointFileManager;
import org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager;

/**
 * Spark's checkpoints in an object store: a file is created whole, under its name, and a file that must not be there is
 * created by one driver only. In any other file system Spark's own way is taken: write, then rename.
 */
public class ConditionalCheckpoints implements CheckpointFileManager {
    private final CheckpointFileManager plain;
    private final FileSystem files;
    private final boolean store;

    public ConditionalCheckpoints(Path path, Configuration conf) throws IOException {
        this.plain = new FileSystemBasedCheckpointFileManager(path, conf);
        this.files = path.getFileSystem(conf);
        this.store = "s3a".equals(this.files.getScheme());
    }

    public CheckpointFileManager.CancellableFSDataOutputStream createAtomic(Path path, boolean overwrite)
        throws IOException {
        if (!store) {
            return plain.createAtomic(path, overwrite);
        }
        if (!overwrite) {
            return new Created(new ConditionalFile(files, path));
        }
        FSDataOutputStreamBuilder builder = files.createFile(path);
        builder.overwrite(true);
        builder.recursive();
        return new Replaced((FSDataOutputStream) builder.build());
    }

    public FSDataInputStream open(Path path) {
        return plain.open(path);
    }

    public FileStatus[] list(Path path, PathFilter filter) {
        return plain.list(path, filter);
    }

    public FileStatus[] list(Path path) {
        return plain.list(path);
    }

    public void mkdirs(Path path) {
        plain.mkdirs(path);
    }

    public boolean exists(Path path) {
        return plain.exists(path);
    }

    public void delete(Path path) {
        plain.delete(path);
    }

    public boolean isLocal() {
        return plain.isLocal();
    }

    public Path createCheckpointDirectory() {
        return plain.createCheckpointDirectory();
    }

    public void close() {
        plain.close();
    }

    /** A file that is created if nobody else has. */
    public static class Created extends CheckpointFileManager.CancellableFSDataOutputStream {
        private final ConditionalFile file;
        private boolean ended;

        public Created(ConditionalFile file) {
            super(file.stream());
            this.file = file;
        }

        public void close() throws IOException {
            if (!ended) {
                ended = true;
                file.commit();
            }
        }

        public void cancel() {
            if (!ended) {
                ended = true;
                file.abort();
            }
        }
    }

    /** A file that replaces what is there. */
    public static class Replaced extends CheckpointFileManager.CancellableFSDataOutputStream {
        private final FSDataOutputStream stream;
        private boolean ended;

        public Replaced(FSDataOutputStream stream) {
            super(stream);
            this.stream = stream;
        }

        public void close() throws IOException {
            if (!ended) {
                ended = true;
                stream.close();
            }
        }

        public void cancel() {
            if (!ended) {
                ended = true;
                ConditionalFile.abort(stream);
            }
        }
    }
}

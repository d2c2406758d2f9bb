package kalman.stores;

import io.delta.storage.HadoopFileSystemLogStore;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.util.Iterator;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FSDataOutputStreamBuilder;
import org.apache.hadoop.fs.FileAlreadyExistsException;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;

/** Delta's log in an object store: of concurrent commits of one version exactly one is created. */
public class ConditionalLogStore extends HadoopFileSystemLogStore {
    public ConditionalLogStore(Configuration conf) {
        super(conf);
    }

    public void write(Path path, Iterator actions, Boolean overwrite, Configuration conf) throws IOException {
        FileSystem files = path.getFileSystem(conf);
        byte[] content = lines(actions);
        if (overwrite.booleanValue()) {
            replace(files, path, content);
            return;
        }
        try {
            create(files, path, content);
        } catch (FileAlreadyExistsException lost) {
            // Delta knows a lost race by Java's own exception.
            java.nio.file.FileAlreadyExistsException told =
                new java.nio.file.FileAlreadyExistsException(path.toString());
            told.initCause(lost);
            throw told;
        }
    }

    /** An object is seen whole or not at all. */
    public Boolean isPartialWriteVisible(Path path, Configuration conf) throws IOException {
        return Boolean.FALSE;
    }

    private static void create(FileSystem files, Path path, byte[] content) throws IOException {
        ConditionalFile file = new ConditionalFile(files, path);
        boolean whole = false;
        try {
            file.stream().write(content);
            whole = true;
        } finally {
            if (!whole) {
                file.abort();
            }
        }
        file.commit();
    }

    private static void replace(FileSystem files, Path path, byte[] content) throws IOException {
        FSDataOutputStreamBuilder builder = files.createFile(path);
        builder.overwrite(true);
        builder.recursive();
        FSDataOutputStream stream = (FSDataOutputStream) builder.build();
        boolean whole = false;
        try {
            stream.write(content);
            whole = true;
        } finally {
            if (!whole) {
                ConditionalFile.abort(stream);
            }
        }
        stream.close();
    }

    private static byte[] lines(Iterator actions) throws IOException {
        ByteArrayOutputStream content = new ByteArrayOutputStream();
        while (actions.hasNext()) {
            content.write(((String) actions.next()).getBytes(StandardCharsets.UTF_8));
            content.write('\n');
        }
        return content.toByteArray();
    }
}

package magnetar.stock;

import java.security.KeyPair;
import java.security.KeyPairGenerator;
import java.util.Base64;
import java.util.Map;
import org.apache.pulsar.client.api.CryptoKeyReader;
import org.apache.pulsar.client.api.EncryptionKeyInfo;

/** A new pair of keys, which is the key of every name. */
final class RsaKeyReader implements CryptoKeyReader {
    private final EncryptionKeyInfo open;
    private final EncryptionKeyInfo secret;

    RsaKeyReader() throws Exception {
        KeyPairGenerator generator = KeyPairGenerator.getInstance("RSA");
        generator.initialize(2048);
        KeyPair keys = generator.generateKeyPair();
        open = new EncryptionKeyInfo(pem("PUBLIC", keys.getPublic().getEncoded()).getBytes(), null);
        secret = new EncryptionKeyInfo(pem("PRIVATE", keys.getPrivate().getEncoded()).getBytes(), null);
    }

    @Override
    public EncryptionKeyInfo getPublicKey(String name, Map<String, String> metadata) {
        return open;
    }

    @Override
    public EncryptionKeyInfo getPrivateKey(String name, Map<String, String> metadata) {
        return secret;
    }

    private static String pem(String kind, byte[] key) {
        String encoded = Base64.getMimeEncoder(64, new byte[] {'\n'}).encodeToString(key);
        return "-----BEGIN " + kind + " KEY-----\n" + encoded + "\n-----END " + kind + " KEY-----\n";
    }
}

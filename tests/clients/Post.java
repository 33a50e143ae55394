import static java.nio.charset.StandardCharsets.UTF_8;

import java.io.PrintStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;
import java.time.Duration;

/** Posts bodies of JSON to an address, one after the other, and prints the lines of each answer as they come. */
class Post {
    public static void main(String[] args) throws Exception {
        var out = new PrintStream(System.out, true, UTF_8);
        // As most programs make one: it offers HTTP/2 by `Upgrade: h2c`.
        var client = HttpClient.newHttpClient();
        for (int i = 1; i < args.length; i++) {
            var request = HttpRequest.newBuilder(URI.create(args[0]))
                .timeout(Duration.ofSeconds(120))
                .header("content-type", "application/json")
                .POST(BodyPublishers.ofString(args[i]))
                .build();
            var response = client.send(request, BodyHandlers.ofLines());
            out.printf("%s %s %d%n", client.version(), response.version(), response.statusCode());
            response.body().forEach(out::println);
        }
    }
}

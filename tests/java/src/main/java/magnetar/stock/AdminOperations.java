package magnetar.stock;

import jakarta.ws.rs.WebApplicationException;
import jakarta.ws.rs.core.Response;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.lang.reflect.Modifier;
import java.lang.reflect.ParameterizedType;
import java.lang.reflect.Type;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;
import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.admin.PulsarAdminException;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.common.policies.data.ErrorData;

/**
 * Calls every operation of the library of {@code pulsar-admin}, found by reflection, on things of its own.
 *
 * <p>An operation is a method of an interface that {@link PulsarAdmin} gives, without the asynchronous twins
 * ({@code ...Async}); a method that has only the asynchronous form counts, and is waited for. The fact
 * {@code operations} is a list: interface, method with the types of its parameters, outcome, and for a refusal the
 * HTTP status and the reason. Names that are of this run are left out of reasons.
 */
final class AdminOperations {
    private static final int ANSWER_TIMEOUT_S = 15;
    private static final int THREADS = 6;

    private final PulsarAdmin admin;
    private final AdminArguments arguments;
    private final String tenant;

    private AdminOperations(PulsarAdmin admin, AdminArguments arguments, String tenant) {
        this.admin = admin;
        this.arguments = arguments;
        this.tenant = tenant;
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("admin_operations", AdminOperations::run);
    }

    private static void run(CaseRun run) throws Exception {
        PulsarAdmin admin = run.closing(PulsarAdmin.builder()
                .serviceHttpUrl(run.arg("web", ""))
                .requestTimeout(ANSWER_TIMEOUT_S, TimeUnit.SECONDS)
                .readTimeout(ANSWER_TIMEOUT_S, TimeUnit.SECONDS)
                .build());
        PulsarClient client = run.closing(
                PulsarClient.builder().serviceUrl(run.url()).enableTransaction(true).build());
        String tenant = run.localName();
        AdminArguments arguments = new AdminArguments(admin, client, tenant);
        run.fact("operations", new AdminOperations(admin, arguments, tenant).callAll());
    }

    private List<Map<String, Object>> callAll() throws Exception {
        arguments.createTenant();
        ExecutorService threads = Executors.newFixedThreadPool(THREADS);
        try {
            List<Future<Map<String, Object>>> calls = new ArrayList<>();
            for (Map.Entry<String, Object> each : interfaces().entrySet()) {
                Class<?> type = interfaceOf(each.getValue());
                for (Method method : operationsOf(type)) {
                    int number = calls.size();
                    calls.add(threads.submit(() -> called(each.getKey(), each.getValue(), method, number)));
                }
            }
            List<Map<String, Object>> found = new ArrayList<>();
            for (Future<Map<String, Object>> call : calls) {
                found.add(call.get());
            }
            return found;
        } finally {
            threads.shutdownNow();
        }
    }

    /** The interfaces by name. Those without methods of their own, as Source, are old names of others. */
    private Map<String, Object> interfaces() throws Exception {
        Map<String, Object> found = new TreeMap<>();
        for (Method accessor : PulsarAdmin.class.getMethods()) {
            Class<?> type = accessor.getReturnType();
            boolean isInterface = type.isInterface() && type.getPackage() == PulsarAdmin.class.getPackage()
                    && !Modifier.isStatic(accessor.getModifiers()) && type.getDeclaredMethods().length > 0;
            if (!isInterface) {
                continue;
            }
            if (accessor.getParameterCount() == 0) {
                found.put(type.getSimpleName(), accessor.invoke(admin));
            } else {
                found.put(type.getSimpleName() + " (global)", accessor.invoke(admin, true));
            }
        }
        return found;
    }

    private static Class<?> interfaceOf(Object implementation) {
        for (Class<?> type = implementation.getClass(); type != null; type = type.getSuperclass()) {
            for (Class<?> each : type.getInterfaces()) {
                if (each.getPackage() != PulsarAdmin.class.getPackage()) {
                    continue;
                }
                return each.getDeclaredMethods().length > 0 ? each : each.getInterfaces()[0];
            }
        }
        throw new IllegalArgumentException("no interface of the library: " + implementation.getClass());
    }

    private static List<Method> operationsOf(Class<?> type) {
        return Arrays.stream(type.getMethods())
                .filter(each -> !Modifier.isStatic(each.getModifiers()) && !each.isSynthetic())
                .filter(each -> !each.getName().endsWith("Async"))
                .sorted((one, other) -> described(one).compareTo(described(other)))
                .collect(Collectors.toList());
    }

    private static String described(Method method) {
        return Arrays.stream(method.getGenericParameterTypes())
                .map(AdminOperations::shortName)
                .collect(Collectors.joining(", ", method.getName() + "(", ")"));
    }

    private static String shortName(Type type) {
        if (type instanceof ParameterizedType generic) {
            return Arrays.stream(generic.getActualTypeArguments())
                    .map(AdminOperations::shortName)
                    .collect(Collectors.joining(", ", shortName(generic.getRawType()) + "<", ">"));
        }
        return type instanceof Class<?> named ? named.getSimpleName() : type.getTypeName();
    }

    private Map<String, Object> called(String name, Object target, Method method, int number) throws Exception {
        Map<String, Object> found = new LinkedHashMap<>();
        found.put("interface", name);
        found.put("method", described(method));
        AdminArguments.Place place = arguments.prepare(name, method, number);
        try {
            Object answer = method.invoke(target, place.argumentsOf(method));
            if (answer instanceof CompletableFuture<?> future) {
                future.get(ANSWER_TIMEOUT_S, TimeUnit.SECONDS);
            }
            found.put("outcome", "answered");
        } catch (InvocationTargetException | ExecutionException failure) {
            describe(found, failure.getCause(), place);
        } catch (java.util.concurrent.TimeoutException late) {
            found.put("outcome", "no answer");
        }
        return found;
    }

    private void describe(Map<String, Object> found, Throwable failure, AdminArguments.Place place) {
        Throwable cause = failure instanceof ExecutionException ? failure.getCause() : failure;
        if (cause instanceof PulsarAdminException.TimeoutException) {
            found.put("outcome", "no answer");
        } else if (cause instanceof PulsarAdminException refused && answerOf(refused) != null) {
            found.put("outcome", "refused");
            found.put("status", answerOf(refused).getStatus());
            found.put("reason", place.anonymous(reasonOf(refused)));
        } else {
            found.put("outcome", "failed in the library");
            found.put("reason", place.anonymous(cause.getClass().getSimpleName() + ": " + cause.getMessage()));
        }
    }

    /** The broker's answer, or null: the library also gives what fails in it a status. */
    private static Response answerOf(PulsarAdminException failure) {
        for (Throwable cause = failure.getCause(); cause != null; cause = cause.getCause()) {
            if (cause instanceof WebApplicationException answered) {
                return answered.getResponse();
            }
        }
        return null;
    }

    /** The reason as the library gives it, or as it is in the answer where the library does not read that. */
    private static String reasonOf(PulsarAdminException failure) {
        String reason = failure.getHttpError();
        Response answer = answerOf(failure);
        if (reason != null && !reason.startsWith("HTTP ")) {
            return reason;
        }
        try {
            return answer.readEntity(ErrorData.class).reason;
        } catch (RuntimeException closed) { // some calls of the library have read the answer away
            return String.valueOf(reason);
        }
    }
}

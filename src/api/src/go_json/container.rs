//! The order in which Go declares the fields of a container, as of Kubernetes 1.34; each earlier release declares a
//! subset of them in the same order.

use super::{GoStruct, nested, quantities, quantity, scalar};

/// `v1.Container`.
pub const CONTAINER: GoStruct = GoStruct(&[
    scalar("name").or_default_json("\"\""),
    scalar("image"),
    scalar("command"),
    scalar("args"),
    scalar("workingDir"),
    nested("ports", &PORT),
    nested("envFrom", &ENV_FROM),
    nested("env", &ENV),
    nested("resources", &RESOURCES).or_default_json("{}"),
    nested("resizePolicy", &RESIZE_POLICY),
    scalar("restartPolicy").pointer(),
    nested("restartPolicyRules", &RESTART_RULE),
    nested("volumeMounts", &VOLUME_MOUNT),
    nested("volumeDevices", &VOLUME_DEVICE),
    nested("livenessProbe", &PROBE),
    nested("readinessProbe", &PROBE),
    nested("startupProbe", &PROBE),
    nested("lifecycle", &LIFECYCLE),
    scalar("terminationMessagePath"),
    scalar("terminationMessagePolicy"),
    scalar("imagePullPolicy"),
    nested("securityContext", &SECURITY_CONTEXT),
    scalar("stdin"),
    scalar("stdinOnce"),
    scalar("tty"),
]);

const PORT: GoStruct = GoStruct(&[
    scalar("name"),
    scalar("hostPort"),
    scalar("containerPort").or_default_json("0"),
    scalar("protocol"),
    scalar("hostIP"),
]);
const ENV_FROM: GoStruct = GoStruct(&[
    scalar("prefix"),
    nested("configMapRef", &SOURCE_REF),
    nested("secretRef", &SOURCE_REF),
]);
const SOURCE_REF: GoStruct = GoStruct(&[scalar("name"), scalar("optional").pointer()]);
const ENV: GoStruct = GoStruct(&[
    scalar("name").or_default_json("\"\""),
    scalar("value"),
    nested("valueFrom", &VALUE_FROM),
]);
const VALUE_FROM: GoStruct = GoStruct(&[
    nested("fieldRef", &FIELD_REF),
    nested("resourceFieldRef", &RESOURCE_FIELD_REF),
    nested("configMapKeyRef", &KEY_REF),
    nested("secretKeyRef", &KEY_REF),
    nested("fileKeyRef", &FILE_KEY_REF),
]);
pub(super) const FIELD_REF: GoStruct =
    GoStruct(&[scalar("apiVersion"), scalar("fieldPath").or_default_json("\"\"")]);
const RESOURCE_FIELD_REF: GoStruct = GoStruct(&[
    scalar("containerName"),
    scalar("resource").or_default_json("\"\""),
    quantity("divisor"),
]);
const KEY_REF: GoStruct = GoStruct(&[
    scalar("name"),
    scalar("key").or_default_json("\"\""),
    scalar("optional").pointer(),
]);
const FILE_KEY_REF: GoStruct = GoStruct(&[
    scalar("volumeName").or_default_json("\"\""),
    scalar("path").or_default_json("\"\""),
    scalar("key").or_default_json("\"\""),
    scalar("optional").pointer(),
]);
const RESOURCES: GoStruct = GoStruct(&[
    quantities("limits"),
    quantities("requests"),
    nested("claims", &CLAIM),
]);
const CLAIM: GoStruct = GoStruct(&[scalar("name").or_default_json("\"\""), scalar("request")]);
const RESIZE_POLICY: GoStruct = GoStruct(&[
    scalar("resourceName").or_default_json("\"\""),
    scalar("restartPolicy").or_default_json("\"\""),
]);
const RESTART_RULE: GoStruct = GoStruct(&[scalar("action"), nested("exitCodes", &EXIT_CODES)]);
const EXIT_CODES: GoStruct = GoStruct(&[scalar("operator"), scalar("values")]);
const VOLUME_MOUNT: GoStruct = GoStruct(&[
    scalar("name").or_default_json("\"\""),
    scalar("readOnly"),
    scalar("recursiveReadOnly").pointer(),
    scalar("mountPath").or_default_json("\"\""),
    scalar("subPath"),
    scalar("mountPropagation").pointer(),
    scalar("subPathExpr"),
]);
const VOLUME_DEVICE: GoStruct = GoStruct(&[
    scalar("name").or_default_json("\"\""),
    scalar("devicePath").or_default_json("\"\""),
]);
/// `v1.Probe`.
pub const PROBE: GoStruct = GoStruct(&[
    nested("exec", &EXEC),
    nested("httpGet", &HTTP_GET),
    nested("tcpSocket", &TCP_SOCKET),
    nested("grpc", &GRPC),
    scalar("initialDelaySeconds"),
    scalar("timeoutSeconds"),
    scalar("periodSeconds"),
    scalar("successThreshold"),
    scalar("failureThreshold"),
    scalar("terminationGracePeriodSeconds").pointer(),
]);
const LIFECYCLE: GoStruct = GoStruct(&[
    nested("postStart", &HANDLER),
    nested("preStop", &HANDLER),
    scalar("stopSignal").pointer(),
]);
const HANDLER: GoStruct = GoStruct(&[
    nested("exec", &EXEC),
    nested("httpGet", &HTTP_GET),
    nested("tcpSocket", &TCP_SOCKET),
    nested("sleep", &SLEEP),
]);
const EXEC: GoStruct = GoStruct(&[scalar("command")]);
const HTTP_GET: GoStruct = GoStruct(&[
    scalar("path"),
    scalar("port").or_default_json("0"),
    scalar("host"),
    scalar("scheme"),
    nested("httpHeaders", &HTTP_HEADER),
]);
const HTTP_HEADER: GoStruct = GoStruct(&[
    scalar("name").or_default_json("\"\""),
    scalar("value").or_default_json("\"\""),
]);
const TCP_SOCKET: GoStruct = GoStruct(&[scalar("port").or_default_json("0"), scalar("host")]);
const GRPC: GoStruct = GoStruct(&[
    scalar("port").or_default_json("0"),
    scalar("service").or_default_json("null"),
]);
const SLEEP: GoStruct = GoStruct(&[scalar("seconds").or_default_json("0")]);
const SECURITY_CONTEXT: GoStruct = GoStruct(&[
    nested("capabilities", &CAPABILITIES),
    scalar("privileged").pointer(),
    nested("seLinuxOptions", &SE_LINUX),
    nested("windowsOptions", &WINDOWS),
    scalar("runAsUser").pointer(),
    scalar("runAsGroup").pointer(),
    scalar("runAsNonRoot").pointer(),
    scalar("readOnlyRootFilesystem").pointer(),
    scalar("allowPrivilegeEscalation").pointer(),
    scalar("procMount").pointer(),
    nested("seccompProfile", &PROFILE),
    nested("appArmorProfile", &PROFILE),
]);
const CAPABILITIES: GoStruct = GoStruct(&[scalar("add"), scalar("drop")]);
const SE_LINUX: GoStruct = GoStruct(&[scalar("user"), scalar("role"), scalar("type"), scalar("level")]);
const WINDOWS: GoStruct = GoStruct(&[
    scalar("gmsaCredentialSpecName").pointer(),
    scalar("gmsaCredentialSpec").pointer(),
    scalar("runAsUserName").pointer(),
    scalar("hostProcess").pointer(),
]);
const PROFILE: GoStruct = GoStruct(&[
    scalar("type").or_default_json("\"\""),
    scalar("localhostProfile").pointer(),
]);

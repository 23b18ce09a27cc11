/* Fused CPU kernels of the learners. kernels.py compiles this file and binds it; tests/learners/test_operations.py
 * holds every function against PyTorch.
 *
 * Tensors are contiguous and row-major. `element` is what matrix products read and write: float, or bfloat16 with
 * -DBF16. All arithmetic and parameters are float. Rows are cut into as many parts as there are threads, and sums of
 * parts are added in their order, so a result depends on the number of threads but never on timing. The OpenMP runtime
 * is the one that PyTorch has loaded: one pool of threads, not two.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef BF16
typedef uint16_t element;
static inline float load(element x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline element store(float value) { /* to nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return value != value ? 0x7fc0 : (element)rounded;
}
#else
typedef float element;
static inline float load(element x) { return x; }
static inline element store(float value) { return value; }
#endif

/* exp that vectorises; relative error 2e-7. Beyond +-87 it stays at the value there, and NaN stays NaN. */
static inline float exp_(float x) {
    x = x > 87.0f ? 87.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f; /* log 2 in two parts */
    float p = 1.394656195e-3f; /* (exp(r) - 1 - r) / r^2, least squares for |r| <= log(2) / 2 */
    p = p * r + 8.369223508e-3f;
    p = p * r + 4.166626152e-2f;
    p = p * r + 1.666651538e-1f;
    p = p * r + 5.000000081e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

/* tanh that vectorises; absolute error 4e-7. */
static inline float tanh_(float x) {
    x = x > 8.0f ? 8.0f : x;
    x = x < -8.0f ? -8.0f : x;
    float q = x * x, a = 1.506174056e-8f, b = 8.453634117e-7f; /* tanh(x) / x as a / b, least squares for |x| <= 8 */
    a = a * q + 2.177319793e-5f;
    a = a * q + 3.564153305e-3f;
    a = a * q + 1.343818880e-1f;
    a = a * q + 9.999999700e-1f;
    b = b * q + 3.399174713e-4f;
    b = b * q + 2.613600507e-2f;
    b = b * q + 4.677150958e-1f;
    b = b * q + 1.0f;
    return x * a / b;
}

static inline float sigmoid(float x) { return 0.5f + 0.5f * tanh_(0.5f * x); }

/* log(1 + e) for e in [0, 1], from the series of atanh(e / (2 + e)). */
static inline float log1p_(float e) {
    float z = e / (2.0f + e), q = z * z;
    float p = 1.0f / 13.0f;
    p = p * q + 1.0f / 11.0f;
    p = p * q + 1.0f / 9.0f;
    p = p * q + 1.0f / 7.0f;
    p = p * q + 1.0f / 5.0f;
    p = p * q + 1.0f / 3.0f;
    return 2.0f * (z * q * p + z);
}

/* Adds all parts to sum, in their order; does nothing if sum is null. */
static inline void add_parts(float *sum, const float *first, long stride, long width, long parts) {
    if (!sum) return;
    for (long part = 0; part < parts; part++)
        for (long i = 0; i < width; i++) sum[i] += first[part * stride + i];
}

static inline long first_row(long part, long parts, long rows) { return rows * part / parts; }

#define BLOCK 8 /* rows that take each step together, so that none waits for its own sums and roots */

static inline long least(long a, long b) { return a < b ? a : b; }

/* out = silu(scale * layer_norm(x + bias) + shift), all (rows, width); mean and 1 / std of each row are for the
 * backward pass. */
void norm_silu(const element *x, const float *bias, const float *scale, const float *shift, element *out, float *mean,
               float *rstd, long rows, long width, long threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (long part = 0; part < threads; part++) {
        long last = first_row(part + 1, threads, rows);
        for (long block = first_row(part, threads, rows); block < last; block += BLOCK) {
            long end = least(block + BLOCK, last);
            for (long row = block; row < end; row++) {
                const element *in = x + row * width;
                float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
                for (long i = 0; i < width; i++) sum += load(in[i]) + bias[i];
                mean[row] = sum / width;
            }
            for (long row = block; row < end; row++) {
                const element *in = x + row * width;
                float squares = 0.0f, m = mean[row];
#pragma omp simd reduction(+ : squares)
                for (long i = 0; i < width; i++) {
                    float d = load(in[i]) + bias[i] - m;
                    squares += d * d;
                }
                rstd[row] = 1.0f / sqrtf(squares / width + 1e-5f);
            }
            for (long row = block; row < end; row++) {
                const element *in = x + row * width;
                element *o = out + row * width;
                float m = mean[row], r = rstd[row];
#pragma omp simd
                for (long i = 0; i < width; i++) {
                    float y = (load(in[i]) + bias[i] - m) * r * scale[i] + shift[i];
                    o[i] = store(y * sigmoid(y));
                }
            }
        }
    }
}

/* Replaces grad, of norm_silu's output, by that of x, and adds to the gradients of bias, scale and shift, (width,)
 * each, unless they are null. scratch is (threads, 3 + 2 BLOCK, width). */
void norm_silu_backward(element *grad, const element *x, const float *bias, const float *scale, const float *shift,
                        const float *mean, const float *rstd, float *of_bias, float *of_scale, float *of_shift,
                        float *scratch, long rows, long width, long threads) {
    long stride = (3 + 2 * BLOCK) * width;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (long part = 0; part < threads; part++) {
        float *grad_bias = scratch + stride * part, *grad_scale = grad_bias + width;
        float *grad_shift = grad_scale + width, *normed = grad_shift + width, *d = normed + BLOCK * width;
        memset(grad_bias, 0, 3 * width * sizeof(float));
        long last = first_row(part + 1, threads, rows);
        for (long block = first_row(part, threads, rows); block < last; block += BLOCK) {
            long count = least(BLOCK, last - block);
            float means[BLOCK], dots[BLOCK];
            for (long k = 0; k < count; k++) {
                const element *in = x + (block + k) * width, *g = grad + (block + k) * width;
                float *n = normed + k * width, *dn = d + k * width;
                float m = mean[block + k], r = rstd[block + k], sum = 0.0f, dot = 0.0f;
#pragma omp simd reduction(+ : sum, dot)
                for (long i = 0; i < width; i++) {
                    n[i] = (load(in[i]) + bias[i] - m) * r;
                    float y = n[i] * scale[i] + shift[i];
                    float gate = sigmoid(y);
                    float dy = load(g[i]) * gate * (1.0f + y * (1.0f - gate));
                    grad_scale[i] += dy * n[i];
                    grad_shift[i] += dy;
                    dn[i] = dy * scale[i];
                    sum += dn[i];
                    dot += dn[i] * n[i];
                }
                means[k] = sum / width;
                dots[k] = dot / width;
            }
            for (long k = 0; k < count; k++) {
                const float *n = normed + k * width, *dn = d + k * width;
                element *g = grad + (block + k) * width;
                float r = rstd[block + k], mean_d = means[k], dot = dots[k];
#pragma omp simd
                for (long i = 0; i < width; i++) {
                    float dx = (dn[i] - mean_d - n[i] * dot) * r;
                    grad_bias[i] += dx;
                    g[i] = store(dx);
                }
            }
        }
    }
    add_parts(of_bias, scratch, stride, width, threads);
    add_parts(of_scale, scratch + width, stride, width, threads);
    add_parts(of_shift, scratch + 2 * width, stride, width, threads);
}

/* p = softmax(logits) of `count` rows, and log(sum(exp(logits))) of each. */
static inline void softmax(const element *logits, float *p, float *log_sum, long count, long atoms) {
    float highest[BLOCK], sums[BLOCK];
    for (long row = 0; row < count; row++) {
        const element *in = logits + row * atoms;
        float *out = p + row * atoms, most = -INFINITY;
#pragma omp simd reduction(max : most)
        for (long k = 0; k < atoms; k++) {
            out[k] = load(in[k]);
            most = out[k] > most ? out[k] : most;
        }
        highest[row] = most;
    }
    for (long row = 0; row < count; row++) {
        float *out = p + row * atoms, most = highest[row], sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (long k = 0; k < atoms; k++) {
            out[k] = exp_(out[k] - most);
            sum += out[k];
        }
        sums[row] = sum;
    }
    for (long row = 0; row < count; row++) {
        float *out = p + row * atoms, inverse = 1.0f / sums[row];
#pragma omp simd
        for (long k = 0; k < atoms; k++) out[k] *= inverse;
        log_sum[row] = logf(sums[row]) + highest[row];
    }
}

/* target = p, a distribution on the atoms low ... high, moved to reward + decay * atom, clipped to the support, and
 * split between neighbouring atoms. Mass for the atom below and for the one above goes to two arrays, so that
 * successive atoms do not wait for each other. scratch is (3, atoms). */
static inline void project(const float *p, float reward, float decay, float low, float high, float *target,
                           float *scratch, long atoms) {
    float *above = scratch, *share = above + atoms;
    int32_t *lower = (int32_t *)(share + atoms);
    float last = atoms - 1, step = (high - low) / last, per_step = last / (high - low);
#pragma omp simd
    for (long k = 0; k < atoms; k++) {
        float moved = reward + decay * (low + k * step);
        moved = moved > high ? high : moved;
        moved = moved < low ? low : moved;
        float position = (moved - low) * per_step;
        float whole = position > 0.0f ? position : 0.0f; /* 0 for NaN, which must not become an index */
        lower[k] = (int32_t)(whole < last ? whole : last);
        share[k] = p[k] * (position - lower[k]);
        target[k] = above[k] = 0.0f;
    }
    for (long k = 0; k < atoms; k++) {
        target[lower[k]] += p[k] - share[k];
        above[lower[k]] += share[k];
    }
#pragma omp simd
    for (long k = 1; k < atoms; k++) target[k] += above[k - 1];
}

/* Cross-entropy of softmax(logits) against softmax(next_logits) moved by the soft Bellman operator and projected onto
 * the atoms low ... high. logits, next_logits and grad are (rows, atoms), soft_reward and bootstrap (rows,). grad is
 * the gradient of the mean over rows; sums is (threads, 2): the summed loss and expected return end up in its first
 * part. scratch is (threads, 4 + 2 BLOCK, atoms). */
void categorical_loss(const element *logits, const element *next_logits, const float *soft_reward,
                      const float *bootstrap, float low, float high, element *grad, double *sums, float *scratch,
                      long rows, long atoms, long threads) {
    float step = (high - low) / (atoms - 1), scale = 1.0f / rows;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (long part = 0; part < threads; part++) {
        float *next = scratch + (4 + 2 * BLOCK) * atoms * part, *p = next + BLOCK * atoms;
        float *target = p + BLOCK * atoms;
        double losses = 0.0, values = 0.0;
        long last = first_row(part + 1, threads, rows);
        for (long block = first_row(part, threads, rows); block < last; block += BLOCK) {
            long count = least(BLOCK, last - block);
            float log_sum[BLOCK];
            softmax(next_logits + block * atoms, next, log_sum, count, atoms);
            softmax(logits + block * atoms, p, log_sum, count, atoms);
            for (long i = 0; i < count; i++) {
                long row = block + i;
                const element *own = logits + row * atoms;
                const float *prediction = p + i * atoms;
                element *g = grad + row * atoms;
                float loss = 0.0f, value = 0.0f;
                project(next + i * atoms, soft_reward[row], bootstrap[row], low, high, target, target + atoms, atoms);
#pragma omp simd reduction(+ : loss, value)
                for (long k = 0; k < atoms; k++) {
                    loss += target[k] * (log_sum[i] - load(own[k]));
                    value += prediction[k] * (low + k * step);
                    g[k] = store((prediction[k] - target[k]) * scale);
                }
                losses += loss;
                values += value;
            }
        }
        sums[2 * part] = losses;
        sums[2 * part + 1] = values;
    }
    for (long part = 1; part < threads; part++) {
        sums[0] += sums[2 * part];
        sums[1] += sums[2 * part + 1];
    }
}

/* value[row] is the mean of softmax(logits) on the atoms low ... high. scratch is (threads, BLOCK, atoms). */
void expected_value(const element *logits, float low, float high, float *value, float *scratch, long rows, long atoms,
                    long threads) {
    float step = (high - low) / (atoms - 1);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (long part = 0; part < threads; part++) {
        float *p = scratch + BLOCK * atoms * part, log_sum[BLOCK];
        long last = first_row(part + 1, threads, rows);
        for (long block = first_row(part, threads, rows); block < last; block += BLOCK) {
            long count = least(BLOCK, last - block);
            softmax(logits + block * atoms, p, log_sum, count, atoms);
            for (long i = 0; i < count; i++) {
                float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
                for (long k = 0; k < atoms; k++) sum += p[i * atoms + k] * (low + k * step);
                value[block + i] = sum;
            }
        }
    }
}

/* grad_logits from grad_value (rows,); the other arguments as in expected_value. */
void expected_value_backward(const float *grad_value, const element *logits, const float *value, float low, float high,
                             element *grad_logits, float *scratch, long rows, long atoms, long threads) {
    float step = (high - low) / (atoms - 1);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (long part = 0; part < threads; part++) {
        float *p = scratch + BLOCK * atoms * part, log_sum[BLOCK];
        long last = first_row(part + 1, threads, rows);
        for (long block = first_row(part, threads, rows); block < last; block += BLOCK) {
            long count = least(BLOCK, last - block);
            softmax(logits + block * atoms, p, log_sum, count, atoms);
            for (long i = 0; i < count; i++) {
                element *g = grad_logits + (block + i) * atoms;
                float grad = grad_value[block + i], mean = value[block + i];
#pragma omp simd
                for (long k = 0; k < atoms; k++) g[k] = store(grad * p[i * atoms + k] * (low + k * step - mean));
            }
        }
    }
}

/* Adds the sums over the rows of x (rows, width) to sums (width,); scratch is (threads, width). */
void column_sums(const element *x, float *sums, float *scratch, long rows, long width, long threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (long part = 0; part < threads; part++) {
        float *own = scratch + width * part;
        memset(own, 0, width * sizeof(float));
        for (long row = first_row(part, threads, rows); row < first_row(part + 1, threads, rows); row++)
            for (long i = 0; i < width; i++) own[i] += load(x[row * width + i]);
    }
    add_parts(sums, scratch, width, width, threads);
}

/* A squashed Gaussian: head is (rows, 2 * actions), means then raw log stds; the others are (rows, actions), log_prob
 * (rows,). squashed = tanh(mean + std * noise), whose log-density is log_prob; log std lies between low and high.
 * raw_tanh is for the backward pass. A row is shorter than a vector, so loops run over all elements: means and raw log
 * stds are first moved to squashed and raw_tanh; scratch is (rows, actions). */
void squash(const element *head, const float *noise, float low, float high, float *squashed, float *std,
            float *raw_tanh, float *log_prob, float *scratch, long rows, long actions, long threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (long part = 0; part < threads; part++) {
        long first = first_row(part, threads, rows), last = first_row(part + 1, threads, rows);
        for (long row = first; row < last; row++)
            for (long i = 0; i < actions; i++) {
                squashed[row * actions + i] = load(head[2 * row * actions + i]);
                raw_tanh[row * actions + i] = load(head[(2 * row + 1) * actions + i]);
            }
#pragma omp simd
        for (long i = first * actions; i < last * actions; i++) {
            float e = exp_(-2.0f * fabsf(raw_tanh[i]));
            float bounded = copysignf((1.0f - e) / (1.0f + e), raw_tanh[i]);
            float log_std = low + 0.5f * (high - low) * (bounded + 1.0f);
            float s = exp_(log_std), n = noise[i], u = squashed[i] + s * n;
            float q = exp_(-2.0f * fabsf(u));
            /* log(1 - tanh(u)^2) = 2 (log 2 - |u| - log(1 + exp(-2 |u|))) */
            scratch[i] = -0.5f * n * n - log_std - 0.918938533f - 2.0f * (0.693147181f - fabsf(u) - log1p_(q));
            squashed[i] = copysignf((1.0f - q) / (1.0f + q), u);
            std[i] = s;
            raw_tanh[i] = bounded;
        }
        for (long row = first; row < last; row++) {
            float sum = 0.0f;
            for (long i = 0; i < actions; i++) sum += scratch[row * actions + i];
            log_prob[row] = sum;
        }
    }
}

/* grad_head from the gradients of squashed (rows, actions) and of log_prob (rows,). */
void squash_backward(const float *grad_squashed, const float *grad_log_prob, const float *noise, const float *squashed,
                     const float *std, const float *raw_tanh, float low, float high, element *grad_head, long rows,
                     long actions, long threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long row = 0; row < rows; row++) {
        element *grad_mean = grad_head + 2 * actions * row, *grad_raw = grad_mean + actions;
        long at = actions * row;
        float g = grad_log_prob[row];
        for (long i = 0; i < actions; i++) {
            float t = squashed[at + i], r = raw_tanh[at + i];
            float grad_u = grad_squashed[at + i] * (1.0f - t * t) + 2.0f * t * g;
            float grad_log_std = grad_u * std[at + i] * noise[at + i] - g;
            grad_mean[i] = store(grad_u);
            grad_raw[i] = store(grad_log_std * 0.5f * (high - low) * (1.0f - r * r));
        }
    }
}

#define SUMMED 64 /* rows added up before their sum is added to the others': rounding then grows with few of them */

/* Mean and biased variance of each column of x (rows, width); scratch is (threads, 2, width). */
void column_moments(const element *x, float *mean, float *variance, float *scratch, long rows, long width,
                    long threads) {
    memset(mean, 0, width * sizeof(float));
    for (int second = 0; second < 2; second++) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
        for (long part = 0; part < threads; part++) {
            float *total = scratch + part * 2 * width, *some = total + width;
            long last = first_row(part + 1, threads, rows);
            memset(total, 0, width * sizeof(float));
            for (long block = first_row(part, threads, rows); block < last; block += SUMMED) {
                memset(some, 0, width * sizeof(float));
                for (long row = block; row < least(block + SUMMED, last); row++) {
                    const element *in = x + row * width;
#pragma omp simd
                    for (long i = 0; i < width; i++) {
                        float d = load(in[i]) - mean[i];
                        some[i] += second ? d * d : d;
                    }
                }
                for (long i = 0; i < width; i++) total[i] += some[i];
            }
        }
        float *sums = second ? variance : mean;
        memset(sums, 0, width * sizeof(float));
        add_parts(sums, scratch, 2 * width, width, threads);
        for (long i = 0; i < width; i++) sums[i] /= rows;
    }
}

/* relu(x * scale + shift), x (rows, width), scale and shift (width,): into out, or added to residual into wide. */
void norm_relu(const element *x, const float *scale, const float *shift, const float *residual, element *out,
               float *wide, long rows, long width, long threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (long part = 0; part < threads; part++)
        for (long row = first_row(part, threads, rows); row < first_row(part + 1, threads, rows); row++) {
            const element *in = x + row * width;
            if (wide) {
                const float *r = residual + row * width;
                float *o = wide + row * width;
#pragma omp simd
                for (long i = 0; i < width; i++) {
                    float y = load(in[i]) * scale[i] + shift[i];
                    o[i] = r[i] + (y <= 0.0f ? 0.0f : y);
                }
            } else {
                element *o = out + row * width;
#pragma omp simd
                for (long i = 0; i < width; i++) {
                    float y = load(in[i]) * scale[i] + shift[i];
                    o[i] = store(y <= 0.0f ? 0.0f : y);
                }
            }
        }
}

/* The gradient of norm_relu's x into of_x, from that of its result, `grad` or `wide`, where scale = weight * rstd and
 * shift = bias - mean * scale. Adds to the gradients of weight and bias unless they are null. With `batch` mean and
 * rstd are those of the rows and depend on them. scratch is (threads, 2, width). */
void norm_relu_backward(const element *grad, const float *wide, const element *x, const float *mean, const float *rstd,
                        const float *scale, const float *shift, element *of_x, float *of_weight, float *of_bias,
                        long batch, float *scratch, long rows, long width, long threads) {
    if (batch || of_weight) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
        for (long part = 0; part < threads; part++) {
            float *s = scratch + part * 2 * width, *t = s + width;
            memset(s, 0, 2 * width * sizeof(float));
            for (long row = first_row(part, threads, rows); row < first_row(part + 1, threads, rows); row++) {
                const element *in = x + row * width, *g = grad + row * width;
                const float *w = wide + row * width;
#pragma omp simd
                for (long i = 0; i < width; i++) {
                    float v = load(in[i]), own = wide ? w[i] : load(g[i]);
                    own = v * scale[i] + shift[i] <= 0.0f ? 0.0f : own;
                    s[i] += own;
                    t[i] += own * (v - mean[i]) * rstd[i];
                }
            }
        }
        for (long part = 1; part < threads; part++) add_parts(scratch, scratch + part * 2 * width, 0, 2 * width, 1);
        add_parts(of_bias, scratch, 0, width, 1);
        add_parts(of_weight, scratch + width, 0, width, 1);
        for (long i = 0; i < 2 * width; i++) scratch[i] /= rows;
    }
    const float *s = scratch, *t = scratch + width;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (long part = 0; part < threads; part++)
        for (long row = first_row(part, threads, rows); row < first_row(part + 1, threads, rows); row++) {
            const element *in = x + row * width, *g = grad + row * width;
            const float *w = wide + row * width;
            element *o = of_x + row * width;
#pragma omp simd
            for (long i = 0; i < width; i++) {
                float v = load(in[i]), own = wide ? w[i] : load(g[i]);
                own = v * scale[i] + shift[i] <= 0.0f ? 0.0f : own;
                if (batch) own -= s[i] + (v - mean[i]) * rstd[i] * t[i];
                o[i] = store(scale[i] * own);
            }
        }
}

/* x (rows, width) becomes elu(x): itself above zero, exp(x) - 1 below. */
void elu(element *x, long rows, long width, long threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (long part = 0; part < threads; part++)
        for (long row = first_row(part, threads, rows); row < first_row(part + 1, threads, rows); row++) {
            element *in = x + row * width;
#pragma omp simd
            for (long i = 0; i < width; i++) {
                float v = load(in[i]), below = exp_(v) - 1.0f;
                in[i] = store(v > 0.0f ? v : below);
            }
        }
}

/* The gradient of elu's argument into of_x, from that of its result `out`; adds its column sums to of_bias (width,).
 * scratch is (threads, width). */
void elu_backward(const element *grad, const element *out, element *of_x, float *of_bias, float *scratch, long rows,
                  long width, long threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (long part = 0; part < threads; part++) {
        float *sums = scratch + part * width;
        memset(sums, 0, width * sizeof(float));
        for (long row = first_row(part, threads, rows); row < first_row(part + 1, threads, rows); row++) {
            const element *o = out + row * width, *g = grad + row * width;
            element *d = of_x + row * width;
#pragma omp simd
            for (long i = 0; i < width; i++) {
                float v = load(o[i]), own = load(g[i]) * (v > 0.0f ? 1.0f : v + 1.0f);
                d[i] = store(own);
                sums[i] += own;
            }
        }
    }
    add_parts(of_bias, scratch, width, width, threads);
}
